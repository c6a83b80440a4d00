"""Pictures that Flux.2 looks at beside a prompt: more tokens behind those of the picture that it makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.family import Cache, ImageInput, References

_AREA = 1024 * 1024
_SIDE_MIN, _RATIO_MAX, _MULTIPLE = 64, 8, 16
_NAMES = [f"reference_{number}" for number in (1, 2, 3, 4)]


def fit(image: Image.Image) -> Image.Image:
    """As diffusers' pipelines do: a million pixels at most, and what is over a multiple of 16 is cut off the edges."""
    width, height = image.size
    if min(width, height) < _SIDE_MIN or max(width, height) > _RATIO_MAX * min(width, height):
        raise InvalidValueError(
            f"image is {width}×{height}, expected sides of {_SIDE_MIN} or more pixels, one at most {_RATIO_MAX} times "
            "the other; enlarge or crop it"
        )
    if width * height > _AREA:
        scale = math.sqrt(_AREA / (width * height))
        width, height = int(width * scale), int(height * scale)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = width % _MULTIPLE // 2, height % _MULTIPLE // 2
    return image.crop((left, top, left + width - width % _MULTIPLE, top + height - height % _MULTIPLE))


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1, height, width] in -1..1 -> the middle of what the VAE sees, as the transformer's latents."""
    moments = module.encoder(pixels.squeeze(2).to(module.encoder.conv_in.weight.dtype))
    moments = moments if module.quant_conv is None else module.quant_conv(moments)
    middle = moments.float().chunk(2, dim=1)[0]
    patches = middle.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    mean, deviation = statistics(module)
    return ((patches - mean) / deviation).unsqueeze(2), []


def statistics(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the VAE's patches, in the shape of pictures: mean and standard deviation."""
    mean, variance = (x.view(1, -1, 1, 1) for x in (module.bn.running_mean, module.bn.running_var))
    return mean, torch.sqrt(variance + module.config.batch_norm_eps)


def condition(latents: Sequence[torch.Tensor], pictures: int, settings: GenerationSettings) -> dict[str, torch.Tensor]:
    return dict(zip(_NAMES, latents, strict=False))


IMAGE_INPUT = ImageInput(encode_frames, condition, optional=tuple(_NAMES), references=References(fit, most=len(_NAMES)))
