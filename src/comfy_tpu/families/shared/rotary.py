"""Rotary tables of a grid of tokens."""

from __future__ import annotations

import torch


def join_axes(in_time: torch.Tensor, in_rows: torch.Tensor, in_columns: torch.Tensor) -> torch.Tensor:
    """[frames, n], [rows, n] and [columns, n] -> [1, frames × rows × columns, 3 n], the three values of an n side by
    side. On the device: the whole table is a thousand times as large as the three."""
    sizes = (len(in_time), len(in_rows), len(in_columns))
    axes = (in_time[:, None, None], in_rows[None, :, None], in_columns[None, None])
    return torch.stack([axis.expand(*sizes, -1) for axis in axes], dim=-1).reshape(1, -1, 3 * in_time.shape[-1])
