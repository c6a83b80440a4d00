"""HunyuanVideo-1.5 text-to-video: the transformer, and what its parts are together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain, joint_attention
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.building import check_whole_numbers, refuse_unknown_keys
from comfy_tpu.families.family import Config, Limits, VideoFamily
from comfy_tpu.families.hunyuan_text import GLYPH_TOKENS, TEXT_ENCODERS
from comfy_tpu.families.hunyuan_vae import (
    SPATIAL_SCALE,
    TEMPORAL_SCALE,
    VAE,
    decode_frame,
    first_cache,
    latent_channels,
    latent_statistics,
)
from comfy_tpu.families.lora_names import ALL, Rows, renamed, rows_of_fused, swapped_halves
from comfy_tpu.families.modulation import Modulation
from comfy_tpu.families.rope import rotate_pairs
from comfy_tpu.families.schedulers import FLOW_SCHEDULERS, euler_from_one, own_shift
from comfy_tpu.parallel.rules import column, gather, replicate, row
from comfy_tpu.parallel.workload import Matrix, Stack, Workload


class HunyuanProcessor:
    """diffusers' attention processor without its mask of tokens by tokens, and with the two streams kept apart.

    Tokens of a text that count stand first, so that a mask is a length: `attention_mask` is the number of keys in each
    row, video and text. diffusers hides filling from queries and as queries; as queries nobody reads it.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(2, (attn.heads, -1))

        query = rotate_pairs(attn.norm_q(heads(attn.to_q(hidden_states))), *image_rotary_emb)
        key = rotate_pairs(attn.norm_k(heads(attn.to_k(hidden_states))), *image_rotary_emb)
        video = query, key, heads(attn.to_v(hidden_states))
        text = (
            attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))),
            attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))),
            heads(attn.add_v_proj(encoder_hidden_states)),
        )
        seen, read = joint_attention(_heads_first(video), _heads_first(text), attention_mask)
        return (
            attn.to_out[1](attn.to_out[0](_joined_heads(seen, hidden_states))),
            attn.to_add_out(_joined_heads(read, encoder_hidden_states)),
        )


class RefinerProcessor:
    """Attention among the tokens of a text, those that are filling hidden: `attention_mask` is [batch, 1, 1, keys]."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        projected = (layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query, key, value = (x.transpose(1, 2) for x in projected)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return attn.to_out[1](attn.to_out[0](_joined_heads(out, hidden_states)))


def _heads_first(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (part.transpose(1, 2) for part in parts)
    return query, key, value


def _joined_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2, 3).type_as(like)


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import HunyuanVideo15Transformer3DModel

    refuse_unknown_keys(HunyuanVideo15Transformer3DModel, config)
    if config.get("use_meanflow"):
        raise UnsupportedError(
            "the transformer was distilled with MeanFlow (use_meanflow), which wants two timesteps; use a model without"
        )
    model = HunyuanVideo15Transformer3DModel.from_config(dict(config))
    for block in model.transformer_blocks:
        block.attn.processor = HunyuanProcessor()
        for norm in (block.norm1, block.norm1_context):
            norm.linear = Modulation(norm.linear.in_features, norm.linear.out_features)
    for block in model.context_embedder.token_refiner.refiner_blocks:
        block.attn.processor = RefinerProcessor()
    return model


_REFINER = "context_embedder.token_refiner.refiner_blocks"

TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("HunyuanVideo15Transformer3DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(LayerStack("transformer_blocks", carry=("hidden_states", "encoder_hidden_states")), LayerStack(_REFINER)),
    # diffusers rounds timesteps to the model's dtype: in bfloat16, 937.5 would be 936.
    float32=("time_embed.*", "context_embedder.time_text_embed.timestep_embedder.*"),
    quantized=(
        "transformer_blocks.*.attn.to_[qkv]",
        "transformer_blocks.*.attn.to_out.0",
        "transformer_blocks.*.ff.net.*",
    ),
    rules=(
        column("transformer_blocks.*.attn.to_[qkv].*"),
        column("transformer_blocks.*.attn.add_[qkv]_proj.*"),
        replicate("transformer_blocks.*.attn.norm_*.weight"),  # of one head
        row("transformer_blocks.*.attn.to_out.0.weight"),
        replicate("transformer_blocks.*.attn.to_out.0.bias"),
        row("transformer_blocks.*.attn.to_add_out.weight"),
        replicate("transformer_blocks.*.attn.to_add_out.bias"),
        column("transformer_blocks.*.ff*.net.0.proj.*"),
        row("transformer_blocks.*.ff*.net.2.weight"),
        replicate("transformer_blocks.*.ff*.net.2.bias"),
        # A third of all weights, for one row each: divided, and their few results are gathered.
        column("transformer_blocks.*.norm1*.linear.*"),
        gather("x_embedder.proj.weight"),
        replicate("x_embedder.proj.bias"),
        gather("image_embedder.*.weight"),
        replicate("image_embedder.*.bias"),
        gather("context_embedder*.weight"),
        replicate("context_embedder*.bias"),
        gather("time_embed.*.weight"),
        replicate("time_embed.*.bias"),
        replicate("cond_type_embed.weight"),
        gather("norm_out.linear.weight"),
        replicate("norm_out.linear.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
    ),
)

_TEXT, _GLYPH, _IMAGE = 0, 1, 2
"""Rows of cond_type_embed."""


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    length = settings.max_sequence_length
    return {
        "text": (length, config["text_embed_dim"]),
        "text_mask": (length, 1),
        "glyph": (GLYPH_TOKENS, config["text_embed_2_dim"]),
        "glyph_mask": (GLYPH_TOKENS, 1),
    }


def prepare(
    module: Any,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    glyph: torch.Tensor,
    glyph_mask: torch.Tensor,
    image: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Everything of the prompt that does not depend on the timestep, and the order of its tokens.

    diffusers puts tokens that count before filling by indexing with masks, whose results have no shape before they are
    known. A stable sort of the mask is the same order. Without a picture none of diffusers' image tokens counts, and
    there are none here.
    """
    embedder, dtype = module.context_embedder, module.context_embedder.proj_in.weight.dtype
    text, glyph = text.to(dtype), glyph.to(dtype)
    count = text_mask.float().sum(dim=1).clamp(min=1)
    pooled = ((text * text_mask).float().sum(dim=1) / count).to(dtype)
    masks, picture = [glyph_mask, text_mask], {}
    if image is not None and condition is not None:
        masks.insert(0, torch.ones_like(image[:, :, :1]))
        embedded = module.image_embedder(image.to(dtype)) + module.cond_type_embed.weight[_IMAGE]
        picture = {"image": embedded, "condition": condition}
    visible = torch.cat([mask.float() for mask in masks], dim=1).squeeze(-1) > 0
    return picture | {
        "text": embedder.proj_in(text),
        "text_visible": text_mask.squeeze(-1) > 0,
        "pooled": embedder.time_text_embed.text_embedder(pooled),
        "glyph": module.context_embedder_2(glyph) + module.cond_type_embed.weight[_GLYPH],
        "order": torch.argsort((~visible).int(), dim=1, stable=True),
        "visible_count": visible.int().sum(dim=1),
    }


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    text: torch.Tensor,
    text_visible: torch.Tensor,
    pooled: torch.Tensor,
    glyph: torch.Tensor,
    order: torch.Tensor,
    visible_count: torch.Tensor,
    image: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """diffusers' forward, with static shapes. Without a picture its channels and their mask are zeros."""
    config, dtype = module.config, module.proj_out.weight.dtype
    batch, channels, *sizes = latents.shape
    if condition is None:
        condition = torch.zeros(batch, config.in_channels - channels, *sizes, device=latents.device)
    latents = torch.cat((latents.to(dtype), condition.to(dtype)), dim=1)
    timestep = timestep.expand(batch)
    time = module.time_embed(timestep).to(dtype)

    # Its tokens are split over sp, of which the order below would make a sum over sp: twice the bytes, and of all rows.
    refined = constrain(_refined(module.context_embedder, text, text_visible, pooled, timestep), "dp", None, None)
    before = (glyph,) if image is None else (image, glyph)
    context = torch.cat((*before, refined + module.cond_type_embed.weight[_TEXT]), dim=1)
    # A product with a permutation: the partitioner divides it by batch, where a gather would bring all rows together.
    places = order.unsqueeze(-1) == torch.arange(order.shape[1], device=order.device)
    context = constrain(places.to(dtype) @ context, "dp", None, None)

    hidden = module.x_embedder(latents)
    keys = visible_count + hidden.shape[1]
    # Every value stands twice in diffusers' tables; [tokens, 1 head, head_dim / 2].
    rotary = tuple(table[:, None, ::2] for table in module.rope(latents))
    for block in module.transformer_blocks:
        hidden, context = block(hidden, context, time, keys, rotary)
    return _unpatched(module.proj_out(module.norm_out(hidden, time)), sizes, config.patch_size_t, config.patch_size)


def _refined(
    embedder: Any, text: torch.Tensor, visible: torch.Tensor, pooled: torch.Tensor, timestep: torch.Tensor
) -> torch.Tensor:
    embed = embedder.time_text_embed
    time = (embed.timestep_embedder(embed.time_proj(timestep)) + pooled).to(text.dtype)
    for block in embedder.token_refiner.refiner_blocks:
        text = block(text, time, visible[:, None, None])
    return text


def _unpatched(tokens: torch.Tensor, sizes: list[int], patch_t: int, patch: int) -> torch.Tensor:
    frames, height, width = sizes[0] // patch_t, sizes[1] // patch, sizes[2] // patch
    grid = tokens.reshape(tokens.shape[0], frames, height, width, -1, patch_t, patch, patch)
    return grid.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


_ORIGINAL_NAMES = (
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_out\.0$", r"txt_in.\1.self_attn_proj"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_[qkv]$", r"txt_in.\1.self_attn_qkv"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.ff\.net\.0\.proj$", r"txt_in.\1.mlp.fc1"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.ff\.net\.2$", r"txt_in.\1.mlp.fc2"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.norm_out\.linear$", r"txt_in.\1.adaLN_modulation.1"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.", r"txt_in.\1."),
    (r"^txt_in\.(\d+)\.", r"txt_in.individual_token_refiner.blocks.\1."),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1$", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2$", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in$", "txt_in.input_embedder"),
    (r"^context_embedder_2\.norm$", "byt5_in.layernorm"),
    (r"^context_embedder_2\.linear_(\d)$", r"byt5_in.fc\1"),
    (r"^image_embedder\.norm_in$", "vision_in.proj.0"),
    (r"^image_embedder\.linear_1$", "vision_in.proj.1"),
    (r"^image_embedder\.linear_2$", "vision_in.proj.3"),
    (r"^image_embedder\.norm_out$", "vision_in.proj.4"),
    (r"^time_embed\.timestep_embedder\.linear_1$", "time_in.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2$", "time_in.mlp.2"),
    (r"^x_embedder\.proj$", "img_in.proj"),
    (r"^cond_type_embed$", "cond_type_embedding"),
    (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
    (r"^proj_out$", "final_layer.linear"),
    (r"\bnorm1\.linear$", "img_mod.linear"),
    (r"\bnorm1_context\.linear$", "txt_mod.linear"),
    (r"\battn\.to_([qkv])$", r"img_attn_\1"),
    (r"\battn\.add_([qkv])_proj$", r"txt_attn_\1"),
    (r"\battn\.to_out\.0$", "img_attn_proj"),
    (r"\battn\.to_add_out$", "txt_attn_proj"),
    (r"\battn\.norm_([qk])$", r"img_attn_\1_norm"),
    (r"\battn\.norm_added_([qk])$", r"txt_attn_\1_norm"),
    (r"\bff\.net\.0\.proj$", "img_mlp.fc1"),
    (r"\bff\.net\.2$", "img_mlp.fc2"),
    (r"\bff_context\.net\.0\.proj$", "txt_mlp.fc1"),
    (r"\bff_context\.net\.2$", "txt_mlp.fc2"),
)
_COMFYUI_NAMES = (
    (r"_attn_[qkv]$", "_attn_qkv"),
    (r"_attn_(qkv|proj)$", r"_attn.\1"),
    (r"_attn_q_norm$", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm$", "_attn.norm.key_norm.scale"),
    (r"_mod\.linear$", "_mod.lin"),
    (r"mlp\.fc1$", "mlp.0"),
    (r"mlp\.fc2$", "mlp.2"),
    (r"_(in|embedder)\.(?:mlp\.0|linear_1)$", r"_\1.in_layer"),
    (r"_(in|embedder)\.(?:mlp\.2|linear_2)$", r"_\1.out_layer"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    """What the authors' code calls a module of diffusers', and what ComfyUI does.

    The authors' names are those that diffusers' conversion of their checkpoints reads. Query, key and value of a block
    are three modules there, and one in ComfyUI; trainers that came from HunyuanVideo write that one as `_attn_qkv`.
    """
    original, fused = renamed(module, _ORIGINAL_NAMES), rows_of_fused(module, shape)
    comfyui = renamed(original, _COMFYUI_NAMES)
    if module == "norm_out.linear":
        return {original: swapped_halves(shape)}
    if fused is None:
        return {original: ALL, comfyui: ALL}
    one_module = comfyui.replace("_attn.qkv", "_attn_qkv")
    return {original: fused if original == one_module else ALL, comfyui: fused, one_module: fused}


def own_settings(read: Callable[[str], Config]) -> dict[str, Any]:
    """The shift of the model's scheduler and the scale of its guider, which differ between 480p and 720p."""
    chosen = own_shift(read)
    if guider := read("guider/guider_config.json"):
        plain = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
        other = [name for name, value in plain.items() if guider.get(name, value) != value]
        if guider.get("_class_name") != "ClassifierFreeGuidance" or other:
            raise UnsupportedError(
                f"the model's guider is a {guider.get('_class_name')} with {', '.join(other) or 'its own rules'}; "
                "supported is ClassifierFreeGuidance with a guidance_scale alone"
            )
        chosen["guidance_scale"] = float(guider.get("guidance_scale", 7.5)) if guider.get("enabled", True) else 1.0
    return chosen


_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_refiner_layers",
    "in_channels",
    "out_channels",
    "patch_size",
    "patch_size_t",
    "text_embed_dim",
    "text_embed_2_dim",
    "image_embed_dim",
)
_TIME_FEATURES = 256
_GLYPH_HIDDEN = 2048
"""Sizes that diffusers' module has without asking its configuration."""


def workload(config: Config, settings: GenerationSettings) -> Workload:
    config = {**_T2V, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    hidden, patch = heads * head_dim, (config["patch_size_t"], config["patch_size"], config["patch_size"])
    ffn, refined = int(hidden * config["mlp_ratio"]), config["num_refiner_layers"]
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    height, width = settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE
    square, output = (hidden, hidden), config["out_channels"] * math.prod(patch)
    text, glyph, image = config["text_embed_dim"], config["text_embed_2_dim"], config["image_embed_dim"]
    return Workload(
        batch=settings.num_videos * (2 if settings.guidance_scale > 1 else 1),
        tokens=(frames // patch[0]) * (height // patch[1]) * (width // patch[2]),
        text_tokens=settings.max_sequence_length + GLYPH_TOKENS,
        text="joint",
        heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        stacks=(
            Stack(
                layers=layers,
                matrices=(
                    Matrix("column", square, count=3),
                    Matrix("row", square),
                    Matrix("column", (ffn, hidden)),
                    Matrix("row", (hidden, ffn)),
                    Matrix("column", square, count=3, rows="text"),
                    Matrix("row", square, rows="text"),
                    Matrix("column", (ffn, hidden), rows="text"),
                    Matrix("row", (hidden, ffn), rows="text"),
                    Matrix("column", (6 * hidden, hidden), count=2, rows="samples"),
                ),
            ),
        ),
        outer=(
            Matrix("gather", (hidden, config["in_channels"], *patch)),
            Matrix("gather", (hidden, _TIME_FEATURES), itemsize=4, count=2),
            Matrix("gather", square, itemsize=4, count=2),
            Matrix("gather", square, count=4 * refined),
            Matrix("gather", (2 * hidden, hidden), count=refined),
            Matrix("gather", (4 * hidden, hidden), count=refined),
            Matrix("gather", (hidden, 4 * hidden), count=refined),
            Matrix("gather", (2 * hidden, hidden)),
            Matrix("gather", (output, hidden)),
            Matrix("gather", (hidden, text), count=2, used=False),
            Matrix("gather", square, used=False),
            Matrix("gather", (_GLYPH_HIDDEN, glyph), used=False),
            Matrix("gather", (_GLYPH_HIDDEN, _GLYPH_HIDDEN), used=False),
            Matrix("gather", (hidden, _GLYPH_HIDDEN), used=False),
            Matrix("gather", (image, image), used=False),
            Matrix("gather", (hidden, image), used=False),
        ),
        small_bytes=layers * 2 * (22 * hidden + 2 * ffn + 4 * head_dim),
        output_features=output,
        latent_bytes=settings.num_videos * config["out_channels"] * frames * height * width * 4,
    )


_T2V: Config = {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_theta": 256.0,
    "rope_axes_dim": (16, 56, 56),
    "task_type": "t2v",
}

PUBLISHED: Mapping[str, Config] = {
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": {**_T2V, "target_size": 960},
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": {**_T2V, "target_size": 640},
}


def _is_hunyuan(index: Config, config: Config) -> bool:
    return index.get("_class_name") == "HunyuanVideo15Pipeline"


HUNYUAN15 = VideoFamily(
    name="HunyuanVideo-1.5",
    matches=_is_hunyuan,
    pipeline_classes=("HunyuanVideo15Pipeline",),
    transformers=(TRANSFORMER,),
    text_encoders=TEXT_ENCODERS,
    vae=VAE,
    limits=Limits(
        size_multiple=SPATIAL_SCALE,
        size_min=SPATIAL_SCALE,
        size_max=2048,
        frames_multiple=TEMPORAL_SCALE,
        frames_max=1025,
        schedulers=("euler", "unipc", "dpm++"),
        tokens_max=1000,
    ),
    defaults=GenerationSettings(
        num_frames=121,
        guidance_scale=6.0,
        flow_shift=9.0,
        scheduler="euler",
        fps=24,
        max_sequence_length=1000,
    ),
    # Without a shift: it belongs to the model, and each size has a model of its own.
    presets={"720P": {"height": 720, "width": 1280}, "480P": {"height": 480, "width": 848}},
    schedulers={**FLOW_SCHEDULERS, "euler": euler_from_one},
    spatial_scale=SPATIAL_SCALE,
    temporal_scale=TEMPORAL_SCALE,
    latent_channels=latent_channels,
    latent_statistics=latent_statistics,
    clean_prompt=str,  # diffusers changes nothing
    embedding_shapes=embedding_shapes,
    prepare=prepare,
    predict=predict,
    decode_frame=decode_frame,
    first_cache=first_cache,
    own_settings=own_settings,
    workload=workload,
    published=PUBLISHED,
    lora_names=lora_names,
)
