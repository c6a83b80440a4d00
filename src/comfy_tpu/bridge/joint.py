"""Attention of video tokens, alone or with a text as one sequence, for torch modules in a trace."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.scope import TraceContext, current_trace
from comfy_tpu.config import TileWindow, TokenWindow
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels import attention as attention_of_arrays
from comfy_tpu.kernels import joint_attention as joint_attention_of_arrays
from comfy_tpu.kernels.windows import TileSchedule, make_schedule

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def video_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Self-attention of a video's tokens, [batch, heads, tokens, head_dim] each, within the window of the trace.

    Without a window, torch's scaled_dot_product_attention.
    """
    trace = current_trace()
    if trace.attention.window is None or trace.token_grid is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)
    bridge, window = environment(), trace.attention.window
    arrays: Any = bridge.as_jax((query, key, value))
    out = attention_of_arrays(
        *arrays,
        placement=trace.placement,
        config=trace.attention,
        window=(window.left, window.right) if isinstance(window, TokenWindow) else None,
        tiles=_tiles(trace),
    )
    result: torch.Tensor = bridge.as_torch(out)
    return result


def joint_attention(
    first: Tensors, second: Tensors, kv_lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a video and its text as one sequence; returns the results of both.

    `first` and `second` are (query, key, value), [batch, heads, tokens, head_dim] each. Each row attends to the first
    `kv_lengths` keys: those of the video, and those of the text that are not padding. A window of tiles in the trace
    limits attention among the video's tokens.
    """
    bridge, trace = environment(), current_trace()
    if trace.token_grid is not None and isinstance(trace.attention.window, TokenWindow):
        raise InvalidValueError(
            f"attention_window={trace.attention.window} is of neighbouring tokens, and this model has video and text "
            "in one sequence; choose video, a window of tiles, or full",
            field="attention_window",
        )
    arrays: Any = bridge.as_jax((first, second, kv_lengths))
    out = joint_attention_of_arrays(
        arrays[0],
        arrays[1],
        placement=trace.placement,
        config=trace.attention,
        kv_lengths=arrays[2],
        tiles=_tiles(trace),
    )
    results: tuple[torch.Tensor, torch.Tensor] = bridge.as_torch(out)
    return results


def _tiles(trace: TraceContext) -> TileSchedule | None:
    window = trace.attention.window
    return make_schedule(window, trace.token_grid) if trace.token_grid and isinstance(window, TileWindow) else None
