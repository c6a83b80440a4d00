"""Attention of two sequences as one, for torch modules in a trace."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.kernels import joint_attention as joint_attention_of_arrays

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def joint_attention(
    first: Tensors, second: Tensors, kv_lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a video and its text as one sequence; returns the results of both.

    `first` and `second` are (query, key, value), [batch, heads, tokens, head_dim] each. Each row attends to the first
    `kv_lengths` keys: those of the video, and those of the text that are not padding.
    """
    bridge, trace = environment(), current_trace()
    arrays: Any = bridge.as_jax((first, second, kv_lengths))
    out = joint_attention_of_arrays(
        arrays[0], arrays[1], placement=trace.placement, config=trace.attention, kv_lengths=arrays[2]
    )
    results: tuple[torch.Tensor, torch.Tensor] = bridge.as_torch(out)
    return results
