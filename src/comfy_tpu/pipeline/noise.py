"""The noise that denoising starts from: drawn on the host, whatever the device, so that a seed has one meaning."""

from __future__ import annotations

import torch


def initial_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """As diffusers draws it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def image_noise(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For a run from an image: of the sample of its latents, which diffusers draws first, and of the run itself."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, *shape[1:]), generator=generator), torch.randn(shape, generator=generator)
