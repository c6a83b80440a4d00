"""Rotary position embeddings without strided writes and complex numbers."""

from __future__ import annotations

import torch


def rotate_pairs(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to neighbouring pairs of the last dimension, in float32; the tables hold a value for each pair."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return pairs.flatten(-2).type_as(x)
