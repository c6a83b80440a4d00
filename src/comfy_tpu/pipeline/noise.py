"""The noise that denoising starts from, drawn on the host, so that a seed gives the same noise on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def initial_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The noise that diffusers draws for this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def rows_noise(shape: tuple[int, ...], seeds: Sequence[int]) -> torch.Tensor:
    """The noise of several videos, each as if it were drawn by itself."""
    return torch.cat([initial_noise((1, *shape[1:]), seed) for seed in seeds])


def image_noise(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise for image-to-image: for the sample of the image's latents, which diffusers draws first, and for
    denoising."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, *shape[1:]), generator=generator), torch.randn(shape, generator=generator)
