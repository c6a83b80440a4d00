"""Operators that only rearrange."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jaxtyping import Array, Shaped

from comfy_tpu.bridge.compat import load_torchax
from comfy_tpu.bridge.operators.table import operator


@operator(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: Shaped[Array, "..."], dim: int, sizes: Sequence[int]) -> Shaped[Array, "..."]:
    dim = dim % input.ndim
    sizes = tuple(sizes)
    known = math.prod(size for size in sizes if size != -1)
    inferred = tuple(input.shape[dim] // max(known, 1) if size == -1 else size for size in sizes)
    if sizes.count(-1) > 1 or math.prod(inferred) != input.shape[dim]:
        raise ValueError(f"unflatten: sizes {sizes} do not multiply up to dimension {dim} of size {input.shape[dim]}")
    return input.reshape(input.shape[:dim] + inferred + input.shape[dim + 1 :])


@operator(torch.chunk, torch.Tensor.chunk, on_torch=True)
def chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    # On torch tensors, because torch's chunks are views: a write into one must reach the whole.
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    dim = dim % input.ndim
    length = input.shape[dim]
    step = max(math.ceil(length / chunks), 1)
    view = load_torchax().view
    return tuple(
        view.View(input, view.NarrowInfo((slice(None),) * dim + (slice(start, start + step),)), input._env)  # type: ignore[attr-defined]
        for start in range(0, max(length, 1), step)
    )


@operator(torch.cartesian_prod)
def cartesian_prod(*tensors: Shaped[Array, " _"]) -> Shaped[Array, "..."]:
    if len(tensors) == 1:
        return tensors[0]
    return jnp.stack([grid.reshape(-1) for grid in jnp.meshgrid(*tensors, indexing="ij")], axis=-1)
