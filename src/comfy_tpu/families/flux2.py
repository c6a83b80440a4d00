"""Flux.2 dev and klein: pictures, which are videos of one frame.

The VAE's 32 channels in patches of 2 × 2, normed, are the 128 of the latents here: one for each 16 × 16 pixels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain
from comfy_tpu.compiler.arranging import Packed, pack_features, unpack_features
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.building import check_whole_numbers, refuse_unknown_keys
from comfy_tpu.families.family import Cache, Config, Limits, SchedulerFactory, VideoFamily
from comfy_tpu.families.flux2_image import IMAGE_INPUT, statistics
from comfy_tpu.families.flux2_text import DEV_TEXT, KLEIN_TEXT
from comfy_tpu.families.flux_names import flux2_names
from comfy_tpu.families.joint import JointProcessor, joined, parted, tp
from comfy_tpu.families.rope import rotate_pairs
from comfy_tpu.families.schedulers import dpm, euler_from_one, unipc
from comfy_tpu.parallel.rules import column, gather, replicate, row
from comfy_tpu.parallel.workload import Matrix, Stack, Workload


class SingleProcessor:
    """diffusers' attention processor of the single blocks, for packed weights and RoPE tables of half the width."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        hidden, ffn = attn.inner_dim, attn.mlp_hidden_dim
        parts = unpack_features(attn.to_qkv_mlp_proj(hidden_states), (hidden, hidden, hidden, ffn, ffn), tp())
        query, key, value = (x.unflatten(-1, (attn.heads, -1)) for x in parts[:3])
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = rotate_pairs(query, *image_rotary_emb), rotate_pairs(key, *image_rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        out = out.transpose(1, 2).flatten(2, 3).type_as(hidden_states)
        gate, linear = parts[3:]
        result: torch.Tensor = attn.to_out(pack_features((out, F.silu(gate) * linear), tp()))
        return result


class PackedSwiGLU(torch.nn.Module):
    """diffusers' activation of gate and value, which come from one product with packed rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        gate, linear = unpack_features(x, (half, half), tp())
        return F.silu(gate) * linear


class Modulation(torch.nn.Linear):
    """What all blocks of a kind are modulated with: one row a sample, computed in pieces and put together.

    In two steps: asked for the whole row alone, the partitioner puts the weights together instead, 0.8 GB a step at
    tp=8 for dev. The row is 74 KB.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return constrain(constrain(super().forward(x), "dp", "tp"), "dp", None)


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import Flux2Transformer2DModel

    refuse_unknown_keys(Flux2Transformer2DModel, config)
    model: Any = Flux2Transformer2DModel.from_config(dict(config))
    for block in model.transformer_blocks:
        block.attn.processor = JointProcessor()
        block.ff.act_fn, block.ff_context.act_fn = PackedSwiGLU(), PackedSwiGLU()
    for block in model.single_transformer_blocks:
        block.attn.processor = SingleProcessor()
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        linear = getattr(model, name).linear
        getattr(model, name).linear = Modulation(linear.in_features, linear.out_features, bias=False)
    built: torch.nn.Module = model
    return built


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLFlux2

    refuse_unknown_keys(AutoencoderKLFlux2, config)
    model: Any = AutoencoderKLFlux2.from_config(dict(config))
    model.bn.num_batches_tracked = None  # a 64-bit count of training, which jax does not hold and nothing reads
    built: torch.nn.Module = model
    return built


def _packed(config: Config) -> tuple[Packed, ...]:
    config = {**_DEV, **config}
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    ffn = int(hidden * config["mlp_ratio"])
    return (
        Packed("transformer_blocks.*.ff.linear_in.weight", (ffn, ffn), dimension=0),
        Packed("transformer_blocks.*.ff_context.linear_in.weight", (ffn, ffn), dimension=0),
        Packed(
            "single_transformer_blocks.*.attn.to_qkv_mlp_proj.weight", (hidden, hidden, hidden, ffn, ffn), dimension=0
        ),
        Packed("single_transformer_blocks.*.attn.to_out.weight", (hidden, ffn)),
    )


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("Flux2Transformer2DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(
        LayerStack("transformer_blocks", carry=("encoder_hidden_states", "hidden_states")),
        LayerStack("single_transformer_blocks"),
    ),
    float32=("time_guidance_embed.*",),
    quantized=(
        "transformer_blocks.*.attn.to_*",
        "transformer_blocks.*.attn.add_[qkv]_proj",
        "transformer_blocks.*.ff*.linear_*",
        "single_transformer_blocks.*.attn.to_*",
    ),
    rules=(
        column("transformer_blocks.*.attn.to_[qkv].weight"),
        column("transformer_blocks.*.attn.add_[qkv]_proj.weight"),
        row("transformer_blocks.*.attn.to_out.0.weight"),
        row("transformer_blocks.*.attn.to_add_out.weight"),
        replicate("transformer_blocks.*.attn.norm_*.weight"),  # over one head, so every device has all of it
        column("transformer_blocks.*.ff*.linear_in.weight"),  # packed
        row("transformer_blocks.*.ff*.linear_out.weight"),
        column("single_transformer_blocks.*.attn.to_qkv_mlp_proj.weight"),  # packed
        row("single_transformer_blocks.*.attn.to_out.weight"),  # packed
        replicate("single_transformer_blocks.*.attn.norm_*.weight"),
        column("*_stream_modulation*.linear.weight"),  # one of each for all blocks: a row of work a step
        gather("time_guidance_embed.*.weight"),
        gather("context_embedder.weight"),
        gather("x_embedder.weight"),
        gather("norm_out.linear.weight"),
        gather("proj_out.weight"),
    ),
    packed=_packed,
)

VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLFlux2",),
    build=_build_vae,
    unused=("bn.num_batches_tracked",),
    float32=("bn.*",),
    rules=(replicate("*"),),  # 0.17 GB; the picture is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    """In patches."""
    return 4 * int(config.get("latent_channels", 32))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
    """Nothing to do: the statistics are weights of the VAE, and what it gives and takes here is normed by them."""
    channels = latent_channels(config)
    return [0.0] * channels, [1.0] * channels


def clean_prompt(text: str) -> str:
    """diffusers' Flux.2 pipelines change nothing before their templates."""
    return text


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, {**_DEV, **config}["joint_attention_dim"])}


def prepare(module: Any, text: torch.Tensor, **references: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of the embeddings no step changes. Pictures are [batch, rows, columns, features] then."""
    dtype = module.x_embedder.weight.dtype
    seen = {name: module.x_embedder(x.squeeze(2).permute(0, 2, 3, 1).to(dtype)) for name, x in references.items()}
    return {"text": module.context_embedder(text.to(module.context_embedder.weight.dtype)), **seen}


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    text: torch.Tensor,
    **references: torch.Tensor,
) -> torch.Tensor:
    """diffusers' forward, from what `prepare` made of the prompt and of pictures to look at."""
    batch, _, _, height, width = latents.shape
    dtype = module.x_embedder.weight.dtype
    looked_at = [references[name] for name in sorted(references)]
    made = module.x_embedder(latents.squeeze(2).flatten(2).transpose(1, 2).to(dtype))
    hidden = torch.cat((made, *(picture.flatten(1, 2) for picture in looked_at)), dim=1)
    embed = module.time_guidance_embed
    condition = embed.timestep_embedder(embed.time_proj(timestep.expand(batch)))
    if embed.guidance_embedder is not None:
        condition = condition + embed.guidance_embedder(embed.time_proj(1000 * guidance_scale.expand(batch)))
    condition = condition.to(dtype)
    text_tokens = text.shape[1]
    sizes = [(height, width), *((picture.shape[1], picture.shape[2]) for picture in looked_at)]
    rotary = rope_tables(module.pos_embed, text_tokens, sizes, latents.device)
    of_picture, of_text = module.double_stream_modulation_img(condition), module.double_stream_modulation_txt(condition)
    for block in module.transformer_blocks:
        text, hidden = block(
            hidden_states=hidden,
            encoder_hidden_states=text,
            temb_mod_img=of_picture,
            temb_mod_txt=of_text,
            image_rotary_emb=rotary,
        )
    hidden = joined(text, hidden)
    of_both = module.single_stream_modulation(condition)
    for block in module.single_transformer_blocks:
        hidden = block(hidden_states=hidden, encoder_hidden_states=None, temb_mod=of_both, image_rotary_emb=rotary)
    _, hidden = parted(hidden, text_tokens)
    velocity: torch.Tensor = module.proj_out(module.norm_out(hidden[:, : height * width], condition))
    return velocity.transpose(1, 2).unflatten(2, (1, height, width))


def rope_tables(
    positions: Any, text_tokens: int, pictures: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, text and picture tokens, 1, head_dim / 2], in the order of `joined`.

    Of each of the four axes on the host, in float64 as diffusers has it, and put together on the devices. The picture
    that is made is at 0, row, column, 0, those that are looked at are at 10, 20 and so on, and the text is at
    0, 0, 0, token.
    """
    rows, columns = (max(sizes) for sizes in zip(*pictures, strict=True))
    pairs = [size // 2 for size in positions.axes_dim]
    places = (10 * np.arange(len(pictures)), np.arange(rows), np.arange(columns), np.arange(text_tokens))
    angles = [
        np.outer(place, 1.0 / positions.theta ** (np.arange(size) / size))
        for place, size in zip(places, pairs, strict=True)
    ]

    def table(function: Any) -> torch.Tensor:
        time, down, across, along = (torch.from_numpy(function(x).astype(np.float32)).to(device) for x in angles)

        def picture(number: int, rows: int, columns: int) -> torch.Tensor:
            axes = (
                time[number].expand(rows, columns, -1),
                down[:rows].unsqueeze(1).expand(-1, columns, -1),
                across[:columns].unsqueeze(0).expand(rows, -1, -1),
                along[0].expand(rows, columns, -1),
            )
            return torch.cat(axes, dim=-1).flatten(0, 1)

        seen = torch.cat([picture(number, *size) for number, size in enumerate(pictures)])
        text = torch.cat((*(x[:1].expand(text_tokens, -1) for x in (time, down, across)), along), dim=-1)
        return joined(text.unsqueeze(0), seen.unsqueeze(0)).unsqueeze(2)

    return table(np.cos), table(np.sin)


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 4 × channels, 1, height, width] of the transformer's latents -> the picture. Nothing is remembered."""
    mean, deviation = statistics(module)
    patches = latent.squeeze(2) * deviation + mean
    x = patches.unflatten(1, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)
    x = x.to(module.decoder.conv_in.weight.dtype)
    pixels = module.decoder(x if module.post_quant_conv is None else module.post_quant_conv(x))
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1).unsqueeze(1), []


def picture_tokens(settings: GenerationSettings) -> int:
    return (settings.height // 16) * (settings.width // 16)


def dynamic_shift(settings: GenerationSettings) -> float:
    """e to the "empirical mu" of diffusers' pipelines: by the number of tokens and, up to 4300 of them, of steps.

    flow_shift is a factor on it.
    """
    tokens = picture_tokens(settings)
    at_200_steps = 0.00016927 * tokens + 0.45666666
    mu = at_200_steps
    if tokens <= 4300:
        at_10_steps = 8.73809524e-05 * tokens + 1.89833333
        mu += (at_200_steps - at_10_steps) / 190 * (settings.num_inference_steps - 200)
    return settings.flow_shift * math.exp(mu)


def _shifted(factory: SchedulerFactory) -> SchedulerFactory:
    return lambda settings: factory(dataclasses.replace(settings, flow_shift=dynamic_shift(settings)))


SCHEDULERS: dict[str, SchedulerFactory] = {
    name: _shifted(factory) for name, factory in (("euler", euler_from_one), ("unipc", unipc), ("dpm++", dpm))
}

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_single_layers",
    "in_channels",
    "joint_attention_dim",
    "timestep_guidance_channels",
)


def _workload(config: Config, settings: GenerationSettings, branches: int) -> Workload:
    # What a configuration leaves out is as in dev, which is where diffusers has its defaults from.
    config = {**_DEV, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden, channels = heads * head_dim, config["in_channels"]
    ffn, embedders = int(config["mlp_ratio"] * hidden), 2 if config["guidance_embeds"] else 1
    square = (hidden, hidden)
    double, single = config["num_layers"], config["num_single_layers"]
    tokens = picture_tokens(settings)
    return Workload(
        batch=settings.num_videos * branches,
        tokens=tokens,
        text_tokens=settings.max_sequence_length,
        text="joint",
        heads=heads,
        head_dim=head_dim,
        ffn=2 * ffn,  # gate and value
        stacks=(
            Stack(
                layers=double,
                matrices=tuple(
                    matrix
                    for rows in ("tokens", "text")
                    for matrix in (
                        Matrix("column", square, count=3, rows=rows),
                        Matrix("row", square, rows=rows),
                        Matrix("column", (2 * ffn, hidden), rows=rows),
                        Matrix("row", (hidden, ffn), rows=rows),
                    )
                ),
            ),
            Stack(
                layers=single,
                matrices=(
                    Matrix("column", (3 * hidden + 2 * ffn, hidden), rows="both"),
                    Matrix("row", (hidden, hidden + ffn), rows="both"),
                ),
            ),
        ),
        outer=(
            Matrix("column", (6 * hidden, hidden), count=2, rows="samples"),
            Matrix("column", (3 * hidden, hidden), rows="samples"),
            Matrix(
                "gather", (hidden, config["timestep_guidance_channels"]), itemsize=4, count=embedders, rows="samples"
            ),
            Matrix("gather", square, itemsize=4, count=embedders, rows="samples"),
            Matrix("gather", (hidden, config["joint_attention_dim"]), used=False),
            Matrix("gather", (hidden, channels)),
            Matrix("gather", (2 * hidden, hidden), rows="samples"),
            Matrix("gather", (channels, hidden)),
        ),
        small_bytes=2 * head_dim * (4 * double + 2 * single),
        output_features=channels,
        latent_bytes=settings.num_videos * channels * tokens * 4,
    )


def workload(config: Config, settings: GenerationSettings) -> Workload:
    return _workload(config, settings, branches=1)


def guided_workload(config: Config, settings: GenerationSettings) -> Workload:
    return _workload(config, settings, branches=2 if settings.guidance_scale > 1 else 1)


_DEV: Config = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 8,
    "num_single_layers": 48,
    "attention_head_dim": 128,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": True,
}
_KLEIN_9B: Config = {
    **_DEV,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
    "guidance_embeds": False,
}
_KLEIN_4B: Config = {
    **_KLEIN_9B,
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
}


def _is_klein(index: Config) -> bool:
    return index.get("_class_name") == "Flux2KleinPipeline"


FLUX2_DEV = VideoFamily(
    name="Flux.2 dev",
    matches=lambda index, config: index.get("_class_name") == "Flux2Pipeline",
    pipeline_classes=("Flux2Pipeline",),
    transformers=(TRANSFORMER,),
    text_encoders=(DEV_TEXT,),
    vae=VAE,
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=1,
        frames_max=1,
        schedulers=tuple(SCHEDULERS),
    ),
    defaults=GenerationSettings(
        height=1024,
        width=1024,
        num_frames=1,
        num_inference_steps=50,
        guidance_scale=4.0,
        flow_shift=1.0,
        scheduler="euler",
    ),
    presets={str(size): {"height": size, "width": size} for size in (512, 768, 1024)},
    schedulers=SCHEDULERS,
    spatial_scale=16,
    temporal_scale=1,
    latent_channels=latent_channels,
    latent_statistics=latent_statistics,
    clean_prompt=clean_prompt,
    embedding_shapes=embedding_shapes,
    prepare=prepare,
    predict=predict,
    decode_frame=decode_frame,
    workload=workload,
    published={"black-forest-labs/FLUX.2-dev": _DEV},
    guidance="embedded",
    image=IMAGE_INPUT,
    lora_names=flux2_names,
)

FLUX2_KLEIN = dataclasses.replace(
    FLUX2_DEV,
    name="Flux.2 klein",
    matches=lambda index, config: _is_klein(index) and bool(index.get("is_distilled")),
    pipeline_classes=("Flux2KleinPipeline",),
    text_encoders=(KLEIN_TEXT,),
    defaults=dataclasses.replace(FLUX2_DEV.defaults, num_inference_steps=4, guidance_scale=1.0),
    published={
        "black-forest-labs/FLUX.2-klein-4B": _KLEIN_4B,
        "black-forest-labs/FLUX.2-klein-9B": _KLEIN_9B,
    },
    guidance="none",
)

FLUX2_KLEIN_BASE = dataclasses.replace(
    FLUX2_KLEIN,
    name="Flux.2 klein base",
    matches=lambda index, config: _is_klein(index) and not index.get("is_distilled"),
    defaults=FLUX2_DEV.defaults,
    workload=guided_workload,
    published={
        "black-forest-labs/FLUX.2-klein-base-4B": _KLEIN_4B,
        "black-forest-labs/FLUX.2-klein-base-9B": _KLEIN_9B,
    },
    guidance="branches",
)
