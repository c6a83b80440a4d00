"""The Flux.2 transformer: diffusers' modules with text and images as one sequence, and one step of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.packed_weights import PackedWeight, pack_features, unpack_features
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.flux2.card import TRANSFORMER_DEV
from comfy_tpu.families.shared.building import refuse_unknown_keys
from comfy_tpu.families.shared.joint_streams import JointProcessor, concat_streams, split_streams, tp
from comfy_tpu.families.shared.rope import rotate_pairs
from comfy_tpu.parallel.rules import column, gather, replicate, row


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


def _packed(config: Config) -> tuple[PackedWeight, ...]:
    config = {**TRANSFORMER_DEV, **config}
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    ffn = int(hidden * config["mlp_ratio"])
    return (
        PackedWeight("transformer_blocks.*.ff.linear_in.weight", (ffn, ffn), dimension=0),
        PackedWeight("transformer_blocks.*.ff_context.linear_in.weight", (ffn, ffn), dimension=0),
        PackedWeight(
            "single_transformer_blocks.*.attn.to_qkv_mlp_proj.weight", (hidden, hidden, hidden, ffn, ffn), dimension=0
        ),
        PackedWeight("single_transformer_blocks.*.attn.to_out.weight", (hidden, ffn)),
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


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, {**TRANSFORMER_DEV, **config}["joint_attention_dim"])}


def prepare(module: Any, text: torch.Tensor, **references: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of the embeddings no step changes. Images are [batch, rows, columns, features] then."""
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
    """diffusers' forward, from what `prepare` made of the prompt and of images to look at."""
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
    hidden = concat_streams(text, hidden)
    of_both = module.single_stream_modulation(condition)
    for block in module.single_transformer_blocks:
        hidden = block(hidden_states=hidden, encoder_hidden_states=None, temb_mod=of_both, image_rotary_emb=rotary)
    _, hidden = split_streams(hidden, text_tokens)
    velocity: torch.Tensor = module.proj_out(module.norm_out(hidden[:, : height * width], condition))
    return velocity.transpose(1, 2).unflatten(2, (1, height, width))


def rope_tables(
    positions: Any, text_tokens: int, pictures: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, text and image tokens, 1, head_dim / 2], in the order of `concat_streams`.

    Of each of the four axes on the host, in float64 as diffusers has it, and put together on the devices. The image
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
        return concat_streams(text.unsqueeze(0), seen.unsqueeze(0)).unsqueeze(2)

    return table(np.cos), table(np.sin)
