"""Interpolation by nearest neighbour; torchax's own entry cannot be called with torch's default arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Shaped

from comfy_tpu.bridge.compat import load_torchax
from comfy_tpu.bridge.operators.table import operator


@operator(torch.nn.functional.interpolate)
def interpolate(
    input: Shaped[Array, "n c ..."],
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Shaped[Array, "n c ..."]:
    if mode not in ("nearest", "nearest-exact"):
        # Not an error: torch breaks the call down into ATen operators, which torchax has.
        raise load_torchax().tensor.OperatorNotFound(f"interpolate(mode={mode!r})")
    rank = input.ndim - 2
    for axis in range(rank):
        length = input.shape[axis + 2]
        if size is not None:
            target = size if isinstance(size, int) else size[axis]
            ratio = length / target
        elif scale_factor is not None:
            factor = scale_factor if isinstance(scale_factor, (int, float)) else scale_factor[axis]
            target = math.floor(length * factor)
            ratio = length / target if recompute_scale_factor else 1 / factor
        else:
            raise ValueError("either size or scale_factor should be defined")
        input = _nearest(input, axis + 2, target, ratio, half_pixel=mode == "nearest-exact")
    return input


def _nearest(x: Shaped[Array, "..."], axis: int, target: int, ratio: float, half_pixel: bool) -> Shaped[Array, "..."]:
    length = x.shape[axis]
    # float32, because torch's CPU kernel chooses its source rows in float32
    rows = (np.arange(target, dtype=np.float32) + np.float32(0.5 if half_pixel else 0)) * np.float32(ratio)
    source = np.minimum(np.floor(rows).astype(np.int32), length - 1)
    if target % length == 0 and np.array_equal(source, np.arange(target) // (target // length)):
        return jnp.repeat(x, target // length, axis)  # a broadcast; taking rows by index would be a gather
    return jnp.take(x, source, axis)
