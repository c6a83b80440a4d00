"""Wan 2.1 text-to-video: the transformer, its UMT5 text encoder and its VAE, as facts and a few small functions."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.building import check_whole_numbers, refuse_unknown_keys
from comfy_tpu.families.family import Cache, Config, Limits, TextEncoder, VideoFamily
from comfy_tpu.families.lora_names import ALL, Rows, renamed
from comfy_tpu.families.rope import rotate_pairs
from comfy_tpu.families.schedulers import FLOW_SCHEDULERS
from comfy_tpu.families.text_encoders import encoded_umt5, umt5_component, without_filling
from comfy_tpu.parallel.rules import column, gather, replicate, row
from comfy_tpu.parallel.workload import Matrix, Stack, Workload


class WanProcessor:
    """diffusers' attention processor without its strided writes, and with the prompt's keys and values given.

    `out[..., 0::2] = …` touches the whole tensor: 3.47 s a forward of the 14B at 480p on one H200 while it was a
    scatter, 2.71 s without.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        if encoder_hidden_states is not None and attn.prompt_key is not None:
            key, value = attn.prompt_key, attn.prompt_value
        else:
            key, value = keys_and_values(
                attn, hidden_states if encoder_hidden_states is None else encoder_hidden_states
            )
        if rotary_emb is not None:
            query, key = rotated(query, *rotary_emb), rotated(key, *rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        if encoder_hidden_states is not None and attn.image_key is not None:  # what the model sees of a given picture
            seen = (x.transpose(1, 2) for x in (attn.image_key, attn.image_value))
            out = out + F.scaled_dot_product_attention(query, *seen)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2, 3).type_as(hidden_states)))


def keys_and_values(attn: Any, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens, heads, head_dim] each."""
    key = attn.norm_k(attn.to_k(context)).unflatten(2, (attn.heads, -1))
    return key, attn.to_v(context).unflatten(2, (attn.heads, -1))


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring pairs of [batch, tokens, heads, head_dim]; both tables hold every value twice."""
    return rotate_pairs(x, cosine[..., 0::2], sine[..., 1::2])


def build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    refuse_unknown_keys(WanTransformer3DModel, config)
    model = WanTransformer3DModel.from_config(dict(config))
    for block in model.blocks:
        block.attn1.processor = block.attn2.processor = WanProcessor()
        for name in ("prompt_key", "prompt_value", "image_key", "image_value"):
            block.attn2.register_buffer(name, None)
    return model


def _build_text_only(config: Mapping[str, Any]) -> torch.nn.Module:
    if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
        raise UnsupportedError(
            "the transformer takes image embeddings, but the model says that it is a text-to-video one; "
            "use the model's own model_index.json"
        )
    return build_transformer(config)


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    refuse_unknown_keys(AutoencoderKLWan, config)
    model = AutoencoderKLWan.from_config(dict(config))
    _pad_pictures_in_convolutions(model)
    return model


def _pad_pictures_in_convolutions(model: torch.nn.Module) -> None:
    """diffusers pads before the convolution, in time and around the picture; here only in time.

    It is the same, and a copy of every picture less. XLA's convolution without padding is also a slow one on a CPU: a
    latent frame of 96×64 pixels, a sixth of the published channels, 0.25 s against 0.13 s.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

    for part in model.modules():
        if isinstance(part, WanCausalConv3d):
            columns, _, rows, _, earlier, _ = part._padding
            part._padding = (0, 0, 0, 0, earlier, 0)
            part.padding = (0, rows, columns)


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("WanTransformer3DModel",),
    heads="num_attention_heads",
    build=_build_text_only,
    stacks=(LayerStack("blocks"),),
    float32=("*time_embedder*", "*scale_shift_table", "*.norm[123].*"),
    # Not the keys and values of the prompt: they are computed once.
    quantized=("blocks.*.attn1.to_*", "blocks.*.attn2.to_q", "blocks.*.attn2.to_out.0", "blocks.*.ffn.net.*"),
    rules=(
        column("blocks.*.attn[12].to_[qkv].*"),
        column("blocks.*.attn[12].norm_[qk].weight"),  # over all heads at once, so it follows the columns
        row("blocks.*.attn[12].to_out.0.weight"),
        replicate("blocks.*.attn[12].to_out.0.bias"),
        column("blocks.*.ffn.net.0.proj.*"),
        row("blocks.*.ffn.net.2.weight"),
        replicate("blocks.*.ffn.net.2.bias"),
        replicate("blocks.*.norm2.*"),
        replicate("blocks.*.scale_shift_table"),
        gather("condition_embedder.*.weight"),
        replicate("condition_embedder.*.bias"),
        gather("patch_embedding.weight"),
        replicate("patch_embedding.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
        replicate("scale_shift_table"),
    ),
)

TEXT_ENCODER = umt5_component("text_encoder")

VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLWan",),
    build=_build_vae,
    rules=(replicate("*"),),  # 0.25 GB; the picture is split over the mesh, not the weights
)


TEMPORAL_SCALE = 4
"""Frames of a latent, except the first."""


def latent_channels(config: Config) -> int:
    return int(config.get("z_dim", 16))


def latent_statistics(config: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    return config["latents_mean"], config["latents_std"]


def clean_prompt(text: str) -> str:
    """As diffusers' Wan pipeline does, so that the same prompt is the same tokens."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    return without_filling(encoded_umt5(module, input_ids, attention_mask), attention_mask)


def encode_prompt(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"text": encode_text(module, input_ids, attention_mask)}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, config["text_dim"])}


def prompt_cache(module: Any, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys and values of every cross-attention, which no step changes: [layers, batch, tokens, heads, head_dim]."""
    dtype = module.blocks.template.attn2.to_k.weight.dtype
    context = module.condition_embedder.text_embedder(text.to(dtype))
    keys, values = module.blocks.map(lambda block: keys_and_values(block.attn2, context))
    return {"blocks.*.attn2.prompt_key": keys, "blocks.*.attn2.prompt_value": values}


PROMPT_AXES = dict.fromkeys(("blocks.*.attn2.prompt_key", "blocks.*.attn2.prompt_value"), (None, "dp", None, "tp"))


def predict(module: Any, latents: torch.Tensor, timestep: torch.Tensor, guidance_scale: torch.Tensor) -> torch.Tensor:
    batch, dtype = latents.shape[0], module.blocks.template.attn2.to_k.weight.dtype
    # The forward wants a text to embed; the real one is in the prompt cache already.
    unused_text = torch.zeros(batch, 1, module.config.text_dim, dtype=dtype, device=latents.device)
    # One timestep for all tokens, or one for each.
    timestep = timestep.expand(batch) if timestep.numel() == 1 else timestep.expand(batch, -1)
    return module(latents.to(dtype), timestep, unused_text, return_dict=False)[0]


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> one frame if it is the first, else four."""
    shape = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(x, device=latent.device).view(shape) for x in latent_statistics(module.config))
    pixels, cache = decode_part(module, latent * std + mean, cache)
    return pixels.add(1).div(2).permute(0, 2, 3, 4, 1), cache


def decode_part(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """As `decode_frame`, but from the VAE's own scale to pixels in -1..1, channels first."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    if cache is None:
        slots: list[Any] = [None] * sum(isinstance(part, torch.nn.Conv3d) for part in module.decoder.modules())
    else:
        slots = list(cache)
    x = module.post_quant_conv(latent.to(module.post_quant_conv.weight.dtype))
    pixels = module.decoder(x, feat_cache=slots, feat_idx=[0], first_chunk=cache is None)
    if module.config.patch_size is not None:
        pixels = unpatchify(pixels, module.config.patch_size)
    return pixels.float().clamp(-1, 1), _of_full_length(slots) if cache is None else slots


def _of_full_length(slots: list[Any]) -> Cache:
    """What the first frame leaves of itself, with zeros in front where later ones leave two frames.

    A causal convolution pads a shorter cache with the same zeros. So all frames behind the first are one program.
    """
    full: list[Any] = []
    for entry in slots:
        if isinstance(entry, str):  # "Rep": an upsampling that passed the first frame by, behind a block of its shape
            full.append(torch.zeros_like(full[-1]))
        elif entry is not None:
            full.append(torch.cat((torch.zeros_like(entry), entry), dim=2))
    return [*full, *[None] * (len(slots) - len(full))]  # convolutions of single pixels remember nothing


_ORIGINAL_NAMES = (
    (r"\battn1\.", "self_attn."),
    (r"\battn2\.", "cross_attn."),
    (r"\bto_([qkv])$", r"\1"),
    (r"\bto_out\.0$", "o"),
    (r"\badd_([kv])_proj$", r"\1_img"),
    (r"\bnorm_added_k$", "norm_k_img"),
    (r"\bffn\.net\.0\.proj$", "ffn.0"),
    (r"\bffn\.net\.2$", "ffn.2"),
    (r"^(blocks\.\d+)\.norm2$", r"\1.norm3"),
    (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out$", "head.head"),
    (r"^condition_embedder\.time_proj$", "time_projection.1"),
    (r"^condition_embedder\.(text|time)_embedder\.linear_1$", r"\1_embedding.0"),
    (r"^condition_embedder\.(text|time)_embedder\.linear_2$", r"\1_embedding.2"),
    (r"^condition_embedder\.image_embedder\.norm1$", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2$", "img_emb.proj.4"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    """What Wan's own code calls a module of diffusers'; ComfyUI and most trainers do as it does."""
    return {renamed(module, _ORIGINAL_NAMES): ALL}


_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "ffn_dim",
    "freq_dim",
    "text_dim",
    "in_channels",
    "out_channels",
)


def workload(config: Config, settings: GenerationSettings, *, spatial_scale: int = 8, models: int = 1) -> Workload:
    """`models`: transformers of this size that stay on the devices."""
    # What a configuration leaves out is as in the 14B, which is where diffusers has its defaults from.
    config = {**PUBLISHED["Wan-AI/Wan2.1-T2V-14B-Diffusers"], **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim, ffn = config["num_attention_heads"], config["attention_head_dim"], config["ffn_dim"]
    layers, hidden, patch = config["num_layers"], heads * head_dim, tuple(config["patch_size"])
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    height, width = (side // spatial_scale for side in (settings.height, settings.width))
    square = (hidden, hidden)
    return Workload(
        batch=settings.num_videos * (2 if settings.guidance_scale > 1 else 1),
        tokens=(frames // patch[0]) * (height // patch[1]) * (width // patch[2]),
        text_tokens=settings.max_sequence_length,
        text="keys",
        heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        stacks=(
            Stack(
                layers=layers,
                matrices=(
                    Matrix("column", square, count=4),  # q, k, v of the video, q of the text
                    # k, v of the text, and of a picture: in the prompt cache
                    Matrix("column", square, count=4 if config.get("added_kv_proj_dim") else 2, used=False),
                    Matrix("row", square, count=2),
                    Matrix("column", (ffn, hidden)),
                    Matrix("row", (hidden, ffn)),
                ),
                norms=3,
            ),
        ),
        outer=(
            Matrix("gather", (hidden, config["freq_dim"]), itemsize=4),
            Matrix("gather", square, itemsize=4),
            Matrix("gather", (6 * hidden, hidden)),
            Matrix("gather", (hidden, config["text_dim"]), used=False),
            Matrix("gather", square, used=False),
            Matrix("gather", (hidden, config["in_channels"], *patch)),
            Matrix("gather", (config["out_channels"] * math.prod(patch), hidden)),
        ),
        small_bytes=layers * (2 * (13 * hidden + ffn) + 4 * 8 * hidden),
        output_features=config["out_channels"] * math.prod(patch),
        latent_bytes=settings.num_videos * config["out_channels"] * frames * height * width * 4,
        models=models,
    )


_WAN21_T2V: Mapping[str, Any] = {
    "patch_size": (1, 2, 2),
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": {
        **_WAN21_T2V,
        "num_attention_heads": 40,
        "ffn_dim": 13824,
        "num_layers": 40,
    },
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {
        **_WAN21_T2V,
        "num_attention_heads": 12,
        "ffn_dim": 8960,
        "num_layers": 30,
    },
}


def _is_wan21(index: Config, config: Config) -> bool:
    return (
        index.get("_class_name") == "WanPipeline"
        and index.get("boundary_ratio") is None
        and not index.get("expand_timesteps")
    )


WAN21 = VideoFamily(
    name="Wan 2.1",
    matches=_is_wan21,
    pipeline_classes=("WanPipeline",),
    transformers=(TRANSFORMER,),
    text_encoders=(TextEncoder(TEXT_ENCODER, encode_prompt),),
    vae=VAE,
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=4,
        frames_max=1025,
        schedulers=tuple(FLOW_SCHEDULERS),
    ),
    defaults=GenerationSettings(),
    presets={
        "720P": {"height": 720, "width": 1280, "flow_shift": 5.0},
        "480P": {"height": 480, "width": 848, "flow_shift": 3.0},
    },
    schedulers=FLOW_SCHEDULERS,
    spatial_scale=8,
    temporal_scale=TEMPORAL_SCALE,
    latent_channels=latent_channels,
    latent_statistics=latent_statistics,
    clean_prompt=clean_prompt,
    embedding_shapes=embedding_shapes,
    prepare=prompt_cache,
    prepared_axes=PROMPT_AXES,
    predict=predict,
    decode_frame=decode_frame,
    workload=workload,
    published=PUBLISHED,
    curves={
        "wan21-t2v-14b.json": {"num_layers": 40, "num_attention_heads": 40},
        "wan21-t2v-1.3b.json": {"num_layers": 30, "num_attention_heads": 12},
    },
    lora_names=lora_names,
)
