"""Sizes that follow the shape of an image."""

from __future__ import annotations

import math

from comfy_tpu.errors import InvalidValueError

_MULTIPLE, _RATIO_MAX = 32, 100


def target_size(width: int, height: int, area: int) -> tuple[int, int]:
    """The width and height of about so many pixels, multiples of 32, as diffusers rounds them."""
    if max(width, height) > _RATIO_MAX * min(width, height):
        raise InvalidValueError(
            f"image is {width}×{height}, expected one side at most {_RATIO_MAX} times the other; crop it", field="image"
        )
    ratio = width / height
    wide = math.sqrt(area * ratio)
    return round(wide / _MULTIPLE) * _MULTIPLE, round(wide / ratio / _MULTIPLE) * _MULTIPLE
