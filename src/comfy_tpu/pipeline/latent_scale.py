"""Between the transformer's scale of latents and the VAE's. Needs no jax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Statistics = tuple[Sequence[float], Sequence[float]]
"""Means and standard deviations of the VAE's latents, by channel."""


def to_vae_scale(latents: torch.Tensor, statistics: Statistics) -> torch.Tensor:
    mean, deviation = _by_channel(statistics)
    return latents * deviation + mean


def from_vae_scale(latents: torch.Tensor, statistics: Statistics) -> torch.Tensor:
    mean, deviation = _by_channel(statistics)
    return (latents - mean) / deviation


def _by_channel(statistics: Statistics) -> list[torch.Tensor]:
    return [torch.tensor(values).view(1, -1, 1, 1, 1) for values in statistics]
