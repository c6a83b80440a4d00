"""Linear layers in 8 bits: weights by output feature, activations by token, both scaled to the range of the format."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from comfy_tpu.config import Platform, Quantization
from comfy_tpu.kernels.choice import HOPPER_AND_LATER

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
_TINY = 1e-12
"""The smallest scale, for tokens that are all zeros."""

_TPU_FORMATS: Mapping[str, Quantization] = {"v5e": "int8", "v6e": "int8", "v7x": "fp8"}


def native_format(platform: Platform, chip: str) -> Quantization:
    """The 8-bit format that a chip multiplies faster than bfloat16; "none" where there is none."""
    if platform == "tpu":
        return _TPU_FORMATS.get(chip, "none")
    return "fp8" if platform == "gpu" and chip in HOPPER_AND_LATER else "none"


def quantized_linear(
    x: Float[Array, "*leading features"],
    weight: Num[Array, "outputs features"],
    scale: Float[Array, " outputs"],
    bias: Float[Array, " outputs"] | None,
    *,
    platform: Platform,
) -> Float[Array, "*leading outputs"]:
    """x · (weight · scale)ᵀ + bias, of 8-bit weights."""
    largest = LARGEST[weight.dtype.name]
    tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    step = jnp.maximum(jnp.max(jnp.abs(tokens), axis=1, keepdims=True) / largest, _TINY)
    scaled = jnp.clip(tokens / step, -largest, largest)
    small = jnp.round(scaled).astype(jnp.int8) if weight.dtype == jnp.int8 else scaled.astype(weight.dtype)
    out = _product(small, weight, platform).astype(jnp.float32) * step * scale
    if bias is not None:
        out = out + bias
    return out.astype(x.dtype).reshape(*x.shape[:-1], -1)


def _product(x: Array, weight: Array, platform: Platform) -> Array:
    multiply = functools.partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    if weight.dtype != jnp.int8 and platform == "cpu":  # where XLA would do the same, element by element
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        return multiply(x, weight, precision=jax.lax.Precision.HIGHEST)
    # Not the trace scope's HIGHEST, which is for float32. Integers are exact either way. On an H200, 32760×5120×5120
    # with scales and rounding, in TFLOP/s and relative error, HIGHEST and DEFAULT: fp8 822 (2.572 %) and 948 (2.575 %),
    # int8 865 and 868 (0.789 % both). Another run, ×5120×13824: fp8 1,101 and 1,117, int8 1,010 and 1,026;
    # ×13824×5120: fp8 1,057 and 1,071, int8 1,021 and 1,033; errors of fp8 are 3.75 to 3.76 % either way.
    multiply = functools.partial(multiply, precision=jax.lax.Precision.DEFAULT)
    if weight.dtype == jnp.int8:
        return multiply(x, weight, preferred_element_type=jnp.int32)
    # On GPUs in bfloat16: 1,070 to 1,223 TFLOP/s on an H200, with float32 results 729, of which nothing is left after
    # the next layer's rounding.
    return multiply(x, weight, preferred_element_type=jnp.bfloat16 if platform == "gpu" else jnp.float32)
