"""The HunyuanVideo-1.5 transformer: diffusers' modules with static shapes, and one step of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain, joint_attention, rotate_pairs
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.hunyuan_video.text import GLYPH_TOKENS
from comfy_tpu.families.shared.modulation import Modulation
from comfy_tpu.families.shared.patches import PatchEmbedding
from comfy_tpu.parallel.rules import column, gather, replicate, row


class HunyuanProcessor:
    """diffusers' attention processor without its mask of tokens × tokens, and with separate streams.

    Real tokens of a text come before its padding, so that the mask is a length: `attention_mask` is the number of keys
    in each row, video and text. diffusers also masks the padding's queries, whose results are not used.
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
            attn.to_out[1](attn.to_out[0](_merge_heads(seen, hidden_states))),
            attn.to_add_out(_merge_heads(read, encoder_hidden_states)),
        )


class RefinerProcessor:
    """Attention among the tokens of a text, with the padding masked: `attention_mask` is [batch, 1, 1, keys]."""

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
        return attn.to_out[1](attn.to_out[0](_merge_heads(out, hidden_states)))


def _heads_first(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (part.transpose(1, 2) for part in parts)
    return query, key, value


def _merge_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2, 3).type_as(like)


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import HunyuanVideo15Transformer3DModel

    if config.get("use_meanflow"):
        raise UnsupportedError(
            "the transformer was distilled with MeanFlow (use_meanflow), which wants two timesteps; use a model without"
        )
    model = HunyuanVideo15Transformer3DModel.from_config(dict(config))
    model.x_embedder.proj = PatchEmbedding.like(model.x_embedder.proj)
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
    """The parts of the prompt's embedding that do not depend on the timestep, and the order of its tokens.

    diffusers moves real tokens before padding by indexing with masks, which gives data-dependent shapes. A stable sort
    of the mask gives the same order. Without an image all of diffusers' image tokens are masked, and there are none
    here.
    """
    embedder, dtype = module.context_embedder, module.context_embedder.proj_in.weight.dtype
    text, glyph = text.to(dtype), glyph.to(dtype)
    count = text_mask.float().sum(dim=1).clamp(min=1)
    pooled = ((text * text_mask).float().sum(dim=1) / count).to(dtype)
    masks, image_inputs = [glyph_mask, text_mask], {}
    if image is not None and condition is not None:
        masks.insert(0, torch.ones_like(image[:, :, :1]))
        embedded = module.image_embedder(image.to(dtype)) + module.cond_type_embed.weight[_IMAGE]
        image_inputs = {"image": embedded, "condition": condition}
    visible = torch.cat([mask.float() for mask in masks], dim=1).squeeze(-1) > 0
    return image_inputs | {
        "text": embedder.proj_in(text),
        "text_visible": text_mask.squeeze(-1) > 0,
        "pooled": embedder.time_text_embed.text_embedder(pooled),
        "glyph": module.context_embedder_2(glyph) + module.cond_type_embed.weight[_GLYPH],
        "order": torch.argsort((~visible).int(), dim=1, stable=True),
        "visible_count": visible.int().sum(dim=1),
    }


def token_grid(config: Config, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    patch = config.get("patch_size", 1)
    return sizes[0] // config.get("patch_size_t", 1), sizes[1] // patch, sizes[2] // patch


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
    """The velocity: diffusers' forward with static shapes. Without an image, its channels and their mask are zeros."""
    config, dtype = module.config, module.proj_out.weight.dtype
    batch, channels, *sizes = latents.shape
    if condition is None:
        condition = torch.zeros(batch, config.in_channels - channels, *sizes, device=latents.device)
    latents = torch.cat((latents.to(dtype), condition.to(dtype)), dim=1)
    timestep = timestep.expand(batch)
    time = module.time_embed(timestep).to(dtype)

    # Its tokens are split over sp, of which the order below would make a sum over sp: twice the bytes, and of all rows.
    refined = constrain(_refine_text(module.context_embedder, text, text_visible, pooled, timestep), "dp", None, None)
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
    return _unpatchify(module.proj_out(module.norm_out(hidden, time)), sizes, config.patch_size_t, config.patch_size)


def _refine_text(
    embedder: Any, text: torch.Tensor, visible: torch.Tensor, pooled: torch.Tensor, timestep: torch.Tensor
) -> torch.Tensor:
    embed = embedder.time_text_embed
    time = (embed.timestep_embedder(embed.time_proj(timestep)) + pooled).to(text.dtype)
    for block in embedder.token_refiner.refiner_blocks:
        text = block(text, time, visible[:, None, None])
    return text


def _unpatchify(tokens: torch.Tensor, sizes: list[int], patch_t: int, patch: int) -> torch.Tensor:
    frames, height, width = sizes[0] // patch_t, sizes[1] // patch, sizes[2] // patch
    grid = tokens.reshape(tokens.shape[0], frames, height, width, -1, patch_t, patch, patch)
    return grid.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
