"""Matrix products."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax
from jaxtyping import Array, Shaped

from comfy_tpu.bridge.operators.table import operator


@operator(torch.nn.functional.linear)
def linear(
    input: Shaped[Array, "*leading features"],
    weight: Shaped[Array, "*outputs features"],
    bias: Shaped[Array, "*outputs"] | None = None,
) -> Shaped[Array, "..."]:
    """The same product as torchax's, without `jnp.einsum`, which wraps a new jit function at every call. JAX keeps up
    to 2,048 of them, so that each model that was opened again left some 900 objects behind."""
    dtype = jnp.promote_types(input.dtype, weight.dtype)
    contracted = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    product = lax.dot_general(input.astype(dtype), weight.astype(dtype), contracted)
    return product if bias is None else product + bias
