"""The Flux.1 transformer: diffusers' modules with text and image as one sequence, and one step of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.packed_weights import PackedWeight, pack_features
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.joint_streams import JointProcessor, concat_streams, split_streams, tp_size
from comfy_tpu.families.shared.modulation import Modulation
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.timesteps import round_guidance, round_timestep
from comfy_tpu.parallel.rules import column, gather, replicate, row

_FFN = 4
"""Width of the feed-forward layers, in hidden sizes. diffusers has it fixed."""


class JointBlock(torch.nn.Module):
    """diffusers' single block for text and image as one sequence; diffusers concatenates and splits them in each block.

    The names of weights are the same.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.attn = block.norm, block.attn
        self.proj_mlp, self.act_mlp, self.proj_out = block.proj_mlp, block.act_mlp, block.proj_out

    def forward(
        self, hidden_states: torch.Tensor, temb: torch.Tensor, image_rotary_emb: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        normed, gate = self.norm(hidden_states, emb=temb)
        mlp = self.act_mlp(self.proj_mlp(normed))
        attention = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        # Both are split over tp, and so is proj_out: columns are packed alike on both sides, and one sum is left.
        return hidden_states + gate.unsqueeze(1) * self.proj_out(pack_features((attention, mlp), tp_size()))


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    model: Any = FluxTransformer2DModel.from_config(dict(config))
    for block in model.transformer_blocks:
        block.attn.processor = JointProcessor()
        for norm in (block.norm1, block.norm1_context):
            norm.linear = Modulation(norm.linear.in_features, norm.linear.out_features)
    for index, block in enumerate(model.single_transformer_blocks):
        block.attn.processor = JointProcessor()
        block.norm.linear = Modulation(block.norm.linear.in_features, block.norm.linear.out_features)
        model.single_transformer_blocks[index] = JointBlock(block)
    built: torch.nn.Module = model
    return built


def _packed_weights(config: Config) -> tuple[PackedWeight, ...]:
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    return (PackedWeight("single_transformer_blocks.*.proj_out.weight", (hidden, _FFN * hidden)),)


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("FluxTransformer2DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(
        LayerStack("transformer_blocks", carry=("encoder_hidden_states", "hidden_states")),
        LayerStack("single_transformer_blocks"),
    ),
    float32=("time_text_embed.*",),
    # Not the modulations: a product with one row is as fast as its weights are read, and the answer scales everything.
    quantized=(
        "transformer_blocks.*.attn.to_*",
        "transformer_blocks.*.attn.add_[qkv]_proj",
        "transformer_blocks.*.ff*.net.*",
        "single_transformer_blocks.*.attn.to_[qkv]",
        "single_transformer_blocks.*.proj_*",
    ),
    rules=(
        column("transformer_blocks.*.norm1*.linear.*"),
        column("transformer_blocks.*.attn.to_[qkv].*"),
        column("transformer_blocks.*.attn.add_[qkv]_proj.*"),
        row("transformer_blocks.*.attn.to_out.0.weight"),
        replicate("transformer_blocks.*.attn.to_out.0.bias"),
        row("transformer_blocks.*.attn.to_add_out.weight"),
        replicate("transformer_blocks.*.attn.to_add_out.bias"),
        replicate("transformer_blocks.*.attn.norm_*.weight"),  # over one head, so every device has all of it
        column("transformer_blocks.*.ff*.net.0.proj.*"),
        row("transformer_blocks.*.ff*.net.2.weight"),
        replicate("transformer_blocks.*.ff*.net.2.bias"),
        column("single_transformer_blocks.*.norm.linear.*"),
        column("single_transformer_blocks.*.attn.to_[qkv].*"),
        replicate("single_transformer_blocks.*.attn.norm_*.weight"),
        column("single_transformer_blocks.*.proj_mlp.*"),
        row("single_transformer_blocks.*.proj_out.weight"),  # packed
        replicate("single_transformer_blocks.*.proj_out.bias"),
        gather("time_text_embed.*.weight"),
        replicate("time_text_embed.*.bias"),
        gather("context_embedder.weight"),
        replicate("context_embedder.bias"),
        gather("x_embedder.weight"),
        replicate("x_embedder.bias"),
        gather("norm_out.linear.weight"),
        replicate("norm_out.linear.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
    ),
    packed=_packed_weights,
)


def prepare(module: Any, pooled: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """The embedded prompt, which is the same for all steps."""
    embedder = module.time_text_embed.text_embedder
    return {
        "pooled": embedder(pooled.to(embedder.linear_1.weight.dtype)),
        "text": module.context_embedder(text.to(module.context_embedder.weight.dtype)),
    }


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    pooled: torch.Tensor,
    text: torch.Tensor,
) -> torch.Tensor:
    """The velocity: diffusers' forward on the outputs of `prepare`."""
    batch, _, _, height, width = latents.shape
    dtype = module.x_embedder.weight.dtype
    hidden = module.x_embedder(as_tokens(latents).to(dtype))
    embed = module.time_text_embed
    condition = embed.timestep_embedder(embed.time_proj(round_timestep(timestep, dtype).expand(batch)))
    if module.config.guidance_embeds:
        guidance = round_guidance(guidance_scale, dtype).expand(batch)
        condition = condition + embed.guidance_embedder(embed.time_proj(guidance))
    condition = (condition + pooled).to(dtype)
    text_tokens = text.shape[1]
    rotary = rope_tables(module.pos_embed, text_tokens, height // 2, width // 2, latents.device)
    for block in module.transformer_blocks:
        text, hidden = block(hidden_states=hidden, encoder_hidden_states=text, temb=condition, image_rotary_emb=rotary)
    hidden = concat_streams(text, hidden)
    for block in module.single_transformer_blocks:
        hidden = block(hidden_states=hidden, temb=condition, image_rotary_emb=rotary)
    _, hidden = split_streams(hidden, text_tokens)
    return as_latents(module.proj_out(module.norm_out(hidden, condition)), height, width)


def rope_tables(
    positions: Any, text_tokens: int, rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, text and image tokens, 1, head_dim / 2], in the order of `concat_streams`.

    Tables of rows and of columns are computed on the host, in float64 as in diffusers, and combined on the devices: the
    whole table would be a constant of megabytes in the program. Text is at 0, 0, 0.
    """
    pairs = [size // 2 for size in positions.axes_dim]
    angles = [
        np.outer(np.arange(count), 1.0 / positions.theta ** (np.arange(size) / size))
        for count, size in zip((1, rows, columns), pairs, strict=True)
    ]

    def table(function: Any) -> torch.Tensor:
        text, down, across = (torch.from_numpy(function(x).astype(np.float32)).to(device) for x in angles)
        image = torch.cat(
            (
                text.view(1, 1, -1).expand(rows, columns, -1),
                down.unsqueeze(1).expand(-1, columns, -1),
                across.unsqueeze(0).expand(rows, -1, -1),
            ),
            dim=-1,
        )
        text_table = torch.full((1, text_tokens, sum(pairs)), float(function(0.0)), device=device)
        return concat_streams(text_table, image.flatten(0, 1).unsqueeze(0)).unsqueeze(2)

    return table(np.cos), table(np.sin)
