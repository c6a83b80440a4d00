"""The Flux.2 transformer: diffusers' modules with text and images as one sequence, and one step of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain, rotate_pairs
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.packed_weights import PackedWeight, pack_features, unpack_features
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.flux2.card import FLUX2_DEV
from comfy_tpu.families.shared.joint_streams import JointProcessor, concat_streams, split_streams, tp_size
from comfy_tpu.families.shared.timesteps import round_guidance, round_timestep
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
        parts = unpack_features(attn.to_qkv_mlp_proj(hidden_states), (hidden, hidden, hidden, ffn, ffn), tp_size())
        query, key, value = (x.unflatten(-1, (attn.heads, -1)) for x in parts[:3])
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = rotate_pairs(query, *image_rotary_emb), rotate_pairs(key, *image_rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        out = out.transpose(1, 2).flatten(2, 3).type_as(hidden_states)
        gate, linear = parts[3:]
        result: torch.Tensor = attn.to_out(pack_features((out, F.silu(gate) * linear), tp_size()))
        return result


class PackedSwiGLU(torch.nn.Module):
    """diffusers' SwiGLU for gate and value that come from one product with packed rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        gate, linear = unpack_features(x, (half, half), tp_size())
        return F.silu(gate) * linear


class Modulation(torch.nn.Linear):
    """The modulation of all blocks of a kind: one row per sample, computed in shards and then gathered.

    In two steps: if only the whole row is constrained, the partitioner gathers the weights instead, 0.8 GB a step at
    tp=8 for dev. The row is 74 KB.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return constrain(constrain(super().forward(x), "dp", "tp"), "dp", None)


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import Flux2Transformer2DModel

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


(_DEV,) = FLUX2_DEV.published.values()


def _packed_weights(config: Config) -> tuple[PackedWeight, ...]:
    config = {**_DEV, **config}
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
    packed=_packed_weights,
)


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, {**_DEV, **config}["joint_attention_dim"])}


def prepare(module: Any, text: torch.Tensor, **references: torch.Tensor) -> dict[str, torch.Tensor]:
    """The embedded prompt and reference images [batch, rows, columns, features], which are the same for all steps."""
    dtype = module.x_embedder.weight.dtype
    embedded = {name: module.x_embedder(x.squeeze(2).permute(0, 2, 3, 1).to(dtype)) for name, x in references.items()}
    return {"text": module.context_embedder(text.to(module.context_embedder.weight.dtype)), **embedded}


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    text: torch.Tensor,
    **references: torch.Tensor,
) -> torch.Tensor:
    """The velocity: diffusers' forward on the outputs of `prepare`."""
    batch, _, _, height, width = latents.shape
    dtype = module.x_embedder.weight.dtype
    reference_tokens = [references[name] for name in sorted(references)]
    noise_tokens = module.x_embedder(latents.squeeze(2).flatten(2).transpose(1, 2).to(dtype))
    hidden = torch.cat((noise_tokens, *(reference.flatten(1, 2) for reference in reference_tokens)), dim=1)
    embed = module.time_guidance_embed
    condition = embed.timestep_embedder(embed.time_proj(round_timestep(timestep, dtype).expand(batch)))
    if embed.guidance_embedder is not None:
        guidance = round_guidance(guidance_scale, dtype).expand(batch)
        condition = condition + embed.guidance_embedder(embed.time_proj(guidance))
    condition = condition.to(dtype)
    text_tokens = text.shape[1]
    sizes = [(height, width), *((reference.shape[1], reference.shape[2]) for reference in reference_tokens)]
    rotary = rope_tables(module.pos_embed, text_tokens, sizes, latents.device)
    image_modulation, text_modulation = (
        module.double_stream_modulation_img(condition),
        module.double_stream_modulation_txt(condition),
    )
    for block in module.transformer_blocks:
        text, hidden = block(
            hidden_states=hidden,
            encoder_hidden_states=text,
            temb_mod_img=image_modulation,
            temb_mod_txt=text_modulation,
            image_rotary_emb=rotary,
        )
    hidden = concat_streams(text, hidden)
    joint_modulation = module.single_stream_modulation(condition)
    for block in module.single_transformer_blocks:
        hidden = block(
            hidden_states=hidden, encoder_hidden_states=None, temb_mod=joint_modulation, image_rotary_emb=rotary
        )
    _, hidden = split_streams(hidden, text_tokens)
    velocity: torch.Tensor = module.proj_out(module.norm_out(hidden[:, : height * width], condition))
    return velocity.transpose(1, 2).unflatten(2, (1, height, width))


def rope_tables(
    positions: Any, text_tokens: int, image_sizes: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, text and image tokens, 1, head_dim / 2], in the order of `concat_streams`.

    Tables of the four axes are computed on the host, in float64 as in diffusers, and combined on the devices. The
    generated image is at 0, row, column, 0, reference images are at 10, 20 and so on, and the text is at 0, 0, 0,
    token.
    """
    rows, columns = (max(sizes) for sizes in zip(*image_sizes, strict=True))
    pairs = [size // 2 for size in positions.axes_dim]
    places = (10 * np.arange(len(image_sizes)), np.arange(rows), np.arange(columns), np.arange(text_tokens))
    angles = [
        np.outer(place, 1.0 / positions.theta ** (np.arange(size) / size))
        for place, size in zip(places, pairs, strict=True)
    ]

    def table(function: Any) -> torch.Tensor:
        time, down, across, along = (torch.from_numpy(function(x).astype(np.float32)).to(device) for x in angles)

        def image_table(number: int, rows: int, columns: int) -> torch.Tensor:
            axes = (
                time[number].expand(rows, columns, -1),
                down[:rows].unsqueeze(1).expand(-1, columns, -1),
                across[:columns].unsqueeze(0).expand(rows, -1, -1),
                along[0].expand(rows, columns, -1),
            )
            return torch.cat(axes, dim=-1).flatten(0, 1)

        images = torch.cat([image_table(number, *size) for number, size in enumerate(image_sizes)])
        text = torch.cat((*(x[:1].expand(text_tokens, -1) for x in (time, down, across)), along), dim=-1)
        return concat_streams(text.unsqueeze(0), images.unsqueeze(0)).unsqueeze(2)

    return table(np.cos), table(np.sin)
