"""Matrix products.

Without `jnp.einsum` as it is, which wraps a new jit function at every call. JAX keeps up to 2,048 of them, so that each
model that was opened again left some 900 objects behind.
"""

from __future__ import annotations

import jax
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
    """The same product as torchax's."""
    dtype = jnp.promote_types(input.dtype, weight.dtype)
    contracted = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    product = lax.dot_general(input.astype(dtype), weight.astype(dtype), contracted)
    return product if bias is None else product + bias


_einsum = jax.jit(jnp.einsum, static_argnums=0, inline=True)
"""One jit function for all: JAX keeps an entry for each equation with its shapes."""


@operator(torch.einsum)
def einsum(
    equation: str, *operands: Shaped[Array, "..."] | list[Shaped[Array, "..."]] | tuple[Shaped[Array, "..."], ...]
) -> Shaped[Array, "..."]:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return _einsum(equation, *operands)
