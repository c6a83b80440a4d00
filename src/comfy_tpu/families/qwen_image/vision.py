"""The vision model of Qwen2.5-VL: windows of patches as a batch, and every eighth block over a whole image.

An image is a grid of patches, four of which become one token. Windows at the right and at the bottom are padded to
whole ones, whose padding no patch attends to: shapes depend on the sizes of the images alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import CheckpointError, UnsupportedError
from comfy_tpu.parallel.rules import Rule, gather, replicate

_THETA = 10000.0
GROUP = 8
"""The last of this many blocks attends to the whole image, the others to windows."""


class VisionBlock(torch.nn.Module):
    """transformers' block for windows of patches, [windows, patches, features]. The names of weights are the same."""

    def __init__(self, block: Any, *, sees_whole_image: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = block.norm1, block.norm2, block.attn, block.mlp
        self.heads, self.sees_whole_image = block.attn.num_heads, sees_whole_image

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        counts: Sequence[int],
    ) -> torch.Tensor:
        hidden_states = hidden_states + self._attend(self.norm1(hidden_states), rotary, visible, counts)
        mlp: torch.Tensor = self.mlp(self.norm2(hidden_states))
        return hidden_states + mlp

    def _attend(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        counts: Sequence[int],
    ) -> torch.Tensor:
        query, key, value = self.attn.qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(2)
        parts = (_rotate_halves(query, *rotary), _rotate_halves(key, *rotary), value)
        if self.sees_whole_image:
            # Each image by itself: its windows are one sequence.
            every = [
                tuple(x.flatten(0, 1).unsqueeze(0) for x in image)
                for image in zip(*(x.split(tuple(counts)) for x in (*parts, visible)), strict=True)
            ]
            out = torch.cat([_attention(*image).flatten(0, 1) for image in every]).unflatten(0, hidden.shape[:2])
        else:
            out = _attention(*parts, visible)
        projected: torch.Tensor = self.attn.proj(out.flatten(-2).type_as(hidden))
        return projected


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """[batch, patches, heads, head_dim] each, and the patches that are seen, [batch, patches]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None, None]).transpose(1, 2)


def _rotate_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """RoPE on halves of the last dimension, in float32; the tables hold a value for each pair."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).type_as(x)


class VisionGroup(torch.nn.Module):
    """Eight blocks, of which the last sees whole images: the unit that is scanned."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__()
        last = len(blocks) - 1
        self.blocks = torch.nn.ModuleList(
            VisionBlock(block, sees_whole_image=index == last) for index, block in enumerate(blocks)
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        counts: Sequence[int],
    ) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, rotary, visible, counts)
        return hidden_states


def build_vision_model(config: Any) -> torch.nn.Module:
    """From the `vision_config` of the text encoder."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    if not isinstance(config, Mapping):
        raise CheckpointError("the config.json of the text encoder has no vision_config; download the model again")
    model: Any = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**config))
    expected = list(range(GROUP - 1, len(model.blocks), GROUP))
    if len(model.blocks) % GROUP or list(model.fullatt_block_indexes) != expected:
        raise UnsupportedError(
            f"the vision model sees whole images in blocks {list(model.fullatt_block_indexes)} of {len(model.blocks)}, "
            f"expected each {GROUP}th one, {expected}; use a model with Qwen2.5-VL"
        )
    blocks = list(model.blocks)
    model.groups = torch.nn.ModuleList(
        VisionGroup(blocks[start : start + GROUP]) for start in range(0, len(blocks), GROUP)
    )
    del model.blocks
    built: torch.nn.Module = model
    return built


def rename_vision(name: str) -> str:
    """visual.blocks.9.x -> visual.groups.1.blocks.1.x"""
    head, found, rest = name.partition("visual.blocks.")
    if head or not found:
        return name
    number, _, inner = rest.partition(".")
    return f"visual.groups.{int(number) // GROUP}.blocks.{int(number) % GROUP}.{inner}"


VISION_STACK = LayerStack("visual.groups", carry_axes=(None, None, None))
VISION_RULES: tuple[Rule, ...] = (
    # Not by columns: eight devices do not divide the 3420 of its feed-forward layers.
    gather("visual.groups.*.attn.*.weight"),
    gather("visual.groups.*.mlp.*.weight"),
    replicate("visual.groups.*.bias"),
    replicate("visual.groups.*.norm[12].weight"),
    replicate("visual.patch_embed.proj.weight"),
    replicate("visual.merger.ln_q.weight"),
    gather("visual.merger.mlp.*.weight"),
    replicate("visual.merger.mlp.*.bias"),
)


def embed_images(visual: Any, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tokens of all images, one behind the other, [tokens, features of the language model].

    An image is the patches of its tokens, [rows, columns, patches of a token, pixels of a patch].
    """
    side = visual.window_size // visual.spatial_merge_size // visual.patch_size
    dtype = visual.patch_embed.proj.weight.dtype
    pixels = torch.cat([_as_windows(image, side) for image in images])
    hidden = F.linear(pixels.to(dtype), visual.patch_embed.proj.weight.flatten(1))
    grids = [(int(image.shape[0]), int(image.shape[1])) for image in images]
    visible = torch.cat([_as_windows(torch.ones_like(image[..., :1]), side) for image in images]).squeeze(-1) > 0
    rotary = _rope_tables(visual, grids, side, hidden.device)
    counts = tuple(-(-rows // side) * -(-columns // side) for rows, columns in grids)
    for group in visual.groups:
        hidden = group(hidden, rotary, visible, counts)
    merged = visual.merger.mlp(visual.merger.ln_q(hidden).unflatten(1, (side * side, -1)).flatten(2))
    return torch.cat(
        [_as_raster(windows, grid, side) for windows, grid in zip(merged.split(counts), grids, strict=True)]
    )


def _as_windows(image: torch.Tensor, side: int) -> torch.Tensor:
    """[rows, columns, patches, features] -> [windows, side × side × patches, features], padded with zeros."""
    rows, columns = image.shape[:2]
    padded = F.pad(image, (0, 0, 0, 0, 0, -columns % side, 0, -rows % side))
    windows = padded.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
    return windows.flatten(2, 4).flatten(0, 1)


def _as_raster(windows: torch.Tensor, grid: tuple[int, int], side: int) -> torch.Tensor:
    """[windows, side × side, features] -> [rows × columns, features], without the padding."""
    rows, columns = grid
    tiles = windows.unflatten(1, (side, side)).unflatten(0, (-(-rows // side), -1)).transpose(1, 2)
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :columns].flatten(0, 1)


def _rope_tables(
    visual: Any, grids: Sequence[tuple[int, int]], side: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [windows, patches, 1, head_dim / 2]: a half for the row of a patch, a half for its column."""
    merge, head = visual.spatial_merge_size, visual.config.hidden_size // visual.config.num_heads
    powers = np.float32(_THETA) ** (np.arange(0, head // 2, 2, dtype=np.float32) / np.float32(head // 2))
    rates = np.float32(1.0) / powers

    def table(function: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        def axis(count: int) -> torch.Tensor:
            angles = np.outer(np.arange(count * merge, dtype=np.float32), rates).astype(np.float64)
            return torch.from_numpy(function(angles).astype(np.float32)).to(device).unflatten(0, (count, merge))

        def image(rows: int, columns: int) -> torch.Tensor:
            shape = (rows, columns, merge, merge, len(rates))
            down = axis(rows)[:, None, :, None].expand(shape)
            across = axis(columns)[None, :, None].expand(shape)
            return _as_windows(torch.cat((down, across), dim=-1).flatten(2, 3), side)

        return torch.cat([image(*grid) for grid in grids]).unsqueeze(2)

    return table(np.cos), table(np.sin)
