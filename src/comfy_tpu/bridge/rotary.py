"""Rotary position embedding, and self-attention with it, for torch modules in a trace."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.bridge.environment import DeviceTensor, environment
from comfy_tpu.bridge.joint import video_attention
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.kernels.rotary_attention import Rotary, has_rotary_attention
from comfy_tpu.kernels.rotary_attention import rotary_attention as rotary_attention_of_arrays

Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Norms = tuple[torch.nn.Module, torch.nn.Module]
Tables = tuple[torch.Tensor, torch.Tensor]


def rotate_pairs(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to neighbouring pairs of the last dimension, in float32; the tables hold a value for each pair."""
    pairs = x.unflatten(-1, (-1, 2))
    rotated = _rotate_swapped(pairs, cosine, sine) if _is_on_gpu(x) else _rotate_stacked(pairs, cosine, sine)
    return rotated.flatten(-2).type_as(x)


def _rotate_stacked(pairs: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = pairs.unbind(-1)
    return torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def _rotate_swapped(pairs: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """The same sums without a concatenation, which XLA writes to a GPU's memory part by part, every other number at a
    time: 1 % of a step of Flux.1 dev on an H200."""
    signs = torch.tensor((-1.0, 1.0), device=pairs.device)
    return pairs * cosine.unsqueeze(-1) + pairs.flip(-1) * (sine.unsqueeze(-1) * signs)


def _is_on_gpu(x: torch.Tensor) -> bool:
    placement = current_trace().placement if isinstance(x, DeviceTensor) else None
    return placement is not None and placement.platform == "gpu"


def rotary_attention(projections: Projections, norms: Norms, tables: Tables, *, heads: int) -> torch.Tensor:
    """Self-attention of a video's tokens, from queries, keys and values as [batch, tokens, heads × head_dim].

    Queries and keys go through their norm and RoPE. The tables (cosine, sine) hold a value for each pair, [1, tokens,
    1, head_dim / 2]. The result has the layout of the projections. On a TPU it is a sequence of kernels where the norms
    are RMS norms over all heads.
    """
    if _has_kernel(projections, norms, tables, heads):
        return _run_kernels(projections, norms, tables, heads)
    query, key = (
        rotate_pairs(norm(x).unflatten(2, (heads, -1)), *tables) for x, norm in zip(projections[:2], norms, strict=True)
    )
    value = projections[2].unflatten(2, (heads, -1))
    out = video_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return out.transpose(1, 2).flatten(2, 3)


def _run_kernels(projections: Projections, norms: Norms, tables: Tables, heads: int) -> torch.Tensor:
    bridge, trace = environment(), current_trace()
    flat = (table.reshape(projections[0].shape[1], -1) for table in tables)
    arrays: Any = bridge.as_jax((*projections, norms[0].weight, norms[1].weight, *flat))
    epsilon: Any = norms[0].eps
    assert trace.placement is not None
    out = rotary_attention_of_arrays(
        arrays[0],
        arrays[1],
        arrays[2],
        Rotary(arrays[3], arrays[4], epsilon, arrays[5], arrays[6]),
        heads=heads,
        placement=trace.placement,
        config=trace.attention,
    )
    result: torch.Tensor = bridge.as_torch(out)
    return result


def _has_kernel(projections: Projections, norms: Norms, tables: Tables, heads: int) -> bool:
    query = projections[0]
    if not isinstance(query, DeviceTensor):
        return False
    trace, width = current_trace(), query.shape[2]
    are_over_all_heads = all(
        isinstance(norm, torch.nn.RMSNorm)
        and norm.weight is not None
        and norm.eps is not None
        and tuple(norm.normalized_shape) == (width,)
        for norm in norms
    )
    array: Any = environment().as_jax(query)
    return (
        are_over_all_heads
        and norms[0].eps == norms[1].eps
        and all(table.numel() == query.shape[1] * (width // heads // 2) for table in tables)
        and has_rotary_attention(array.shape, heads, array.dtype, trace.placement, trace.attention)
    )
