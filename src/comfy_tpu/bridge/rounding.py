"""Rounding to another dtype's digits, for torch modules in a trace."""

from __future__ import annotations

from typing import Any

import jax
import torch

from comfy_tpu.bridge.dtypes import numpy_dtype
from comfy_tpu.bridge.environment import DeviceTensor, environment


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` with the digits that `dtype` keeps, in its own dtype.

    XLA may drop a conversion to fewer digits and back (`xla_allow_excess_precision`), but not this.
    """
    if not isinstance(x, DeviceTensor):
        return x.to(dtype).to(x.dtype)
    bridge = environment()
    array: Any = bridge.as_jax(x)
    limits = jax.numpy.finfo(numpy_dtype(dtype))
    rounded: torch.Tensor = bridge.as_torch(jax.lax.reduce_precision(array, limits.nexp, limits.nmant))
    return rounded
