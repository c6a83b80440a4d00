"""Image-to-image: denoising that starts from an image instead of from noise alone."""

from __future__ import annotations

import dataclasses

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError


@dataclasses.dataclass(frozen=True)
class InitImage:
    latents: torch.Tensor
    """[1, channels, 1, height, width] in the transformer's scale."""
    strength: float
    """The share of the steps that are run, counted from the last: 1 keeps nothing of the image."""


def first_step(count: int, strength: float) -> int:
    """The number of the first step that is run, from 0, as diffusers' image-to-image pipelines count."""
    return int(max(count - min(count * strength, count), 0))


def check_init_image(image: torch.Tensor, settings: GenerationSettings, strength: float) -> None:
    expected = (1, settings.height, settings.width, 3)
    if tuple(image.shape) != expected or not image.is_floating_point():
        raise InvalidValueError(
            f"image is {image.dtype} {list(image.shape)}, expected floats {list(expected)}", field="image"
        )
    check_strength(strength, settings.num_inference_steps)


def check_strength(strength: float, steps: int) -> None:
    if not isinstance(strength, (int, float)) or not 0 < strength <= 1:
        raise InvalidValueError(f"strength={strength!r} is not a number over 0, up to 1", field="strength")
    if first_step(steps, strength) == steps:
        raise InvalidValueError(
            f"strength={strength} leaves none of {steps} steps; use {1 / steps:.3g} or more", field="strength"
        )
