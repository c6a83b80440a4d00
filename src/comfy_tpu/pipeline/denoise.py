"""The loop over the steps: one program for every step, latents on the devices throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comfy_tpu.pipeline.schedule import HISTORY

Predict = Callable[..., torch.Tensor]


def make_step(predict: Predict) -> Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """A step as a function on torch tensors: the model's answer, guidance, and the scheduler's weighted sum."""

    def denoise_step(
        module: Any,
        samples: list[torch.Tensor],
        outputs: list[torch.Tensor],
        coefficients: torch.Tensor,
        timestep: torch.Tensor,
        guidance_scale: torch.Tensor,
        prepared: dict[str, torch.Tensor],
        guided: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        latents = samples[0]
        if guided:
            # Both branches in one batch, which dp divides between two halves of the mesh.
            both = predict(module, torch.cat((latents, latents)), timestep, guidance_scale, **prepared)
            positive, negative = both.float().chunk(2)
            velocity = negative + guidance_scale * (positive - negative)
        else:
            velocity = predict(module, latents, timestep, guidance_scale, **prepared).float()
        return _advance(samples, [velocity, *outputs[:-1]], coefficients)

    return denoise_step


def reuse_step(
    module: Any,
    samples: list[torch.Tensor],
    outputs: list[torch.Tensor],
    coefficients: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step without the model: its last answer, scaled, stands for the next."""
    return _advance(samples, [scale * outputs[0], *outputs[:-1]], coefficients)


def _advance(
    samples: list[torch.Tensor], outputs: list[torch.Tensor], coefficients: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    known = torch.stack((*samples, *outputs))
    after = (coefficients.view(2 * HISTORY, *(1,) * samples[0].ndim) * known).sum(0)
    return [after, *samples[:-1]], outputs


def initial_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """As diffusers draws it: on the host, whatever the device, so that a seed means the same noise everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def picture_noise(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For a run from a picture: of the sample of its latents, which diffusers draws first, and of the run's own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, *shape[1:]), generator=generator), torch.randn(shape, generator=generator)
