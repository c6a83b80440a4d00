"""Operators that only rearrange."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jaxtyping import Array, Shaped

from comfy_tpu.bridge.memory import make_view
from comfy_tpu.bridge.operators.table import operator
from comfy_tpu.bridge.recipes import Index, Reshape

# unflatten and chunk are written on torch tensors, because in torch they are views: a write into one reaches the whole.


@operator(torch.unflatten, torch.Tensor.unflatten, on_torch=True)
def unflatten(input: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    dim = dim % input.ndim
    sizes = tuple(sizes)
    known = math.prod(size for size in sizes if size != -1)
    inferred = tuple(input.shape[dim] // max(known, 1) if size == -1 else size for size in sizes)
    if sizes.count(-1) > 1 or math.prod(inferred) != input.shape[dim]:
        raise ValueError(f"unflatten: sizes {sizes} do not multiply up to dimension {dim} of size {input.shape[dim]}")
    view: torch.Tensor = make_view(input, Reshape((*input.shape[:dim], *inferred, *input.shape[dim + 1 :])))
    return view


@operator(torch.chunk, torch.Tensor.chunk, on_torch=True)
def chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    dim = dim % input.ndim
    length = input.shape[dim]
    step = max(math.ceil(length / chunks), 1)
    return tuple(
        make_view(input, Index((slice(None),) * dim + (slice(start, start + step),), tuple(input.shape)))
        for start in range(0, max(length, 1), step)
    )


@operator(torch.cartesian_prod)
def cartesian_prod(*tensors: Shaped[Array, " _"]) -> Shaped[Array, "..."]:
    if len(tensors) == 1:
        return tensors[0]
    return jnp.stack([grid.reshape(-1) for grid in jnp.meshgrid(*tensors, indexing="ij")], axis=-1)
