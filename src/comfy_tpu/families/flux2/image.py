"""Reference images of Flux.2: their tokens follow those of the generated image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import FittedMedia, reference_clips
from comfy_tpu.families.model_family import MediaEncoding

_AREA = 1024 * 1024
_SIDE_MIN, _RATIO_MAX, _MULTIPLE = 64, 8, 16
_NAMES = [f"reference_{number}" for number in (1, 2, 3, 4)]


def fit(image: Image.Image) -> Image.Image:
    """Resizes an image to a million pixels at most, and crops its sides to multiples of 16, as diffusers does."""
    width, height = image.size
    if min(width, height) < _SIDE_MIN or max(width, height) > _RATIO_MAX * min(width, height):
        raise InvalidValueError(
            f"image is {width}×{height}, expected sides of {_SIDE_MIN} or more pixels, one at most {_RATIO_MAX} times "
            "the other; enlarge or crop it",
            field="image",
        )
    if width * height > _AREA:
        scale = math.sqrt(_AREA / (width * height))
        width, height = int(width * scale), int(height * scale)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = width % _MULTIPLE // 2, height % _MULTIPLE // 2
    return image.crop((left, top, left + width - width % _MULTIPLE, top + height - height % _MULTIPLE))


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    return {name: frames[0] for name, frames in zip(_NAMES, latents.values(), strict=False)}


REFERENCES = MediaEncoding(reference_clips, condition, optional_embeddings=tuple(_NAMES), fit_reference=fit)
