"""Latents of an image as the tokens of a transformer, as diffusers' pipelines pack them."""

from __future__ import annotations

import torch


def as_tokens(latents: torch.Tensor) -> torch.Tensor:
    """[batch, channels, 1, height, width] -> a token for each 2 × 2 latents, channel by channel."""
    patches = latents.squeeze(2).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def as_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `as_tokens`; height and width in latents."""
    patches = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3).unsqueeze(2)
