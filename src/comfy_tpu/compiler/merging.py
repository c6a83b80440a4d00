"""Changes of weights, such as LoRA's: added to them on their devices, or on the host where they are quantized after."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.compiler.weights import AfterWrite, WeightSlot, WeightSource, put

RANK_MIN = 16


@dataclasses.dataclass(frozen=True)
class WeightChange:
    """What is added to one tensor of a checkpoint: up @ down, or a difference, or both. All are float32."""

    up: torch.Tensor | None = None
    """[outputs, rank]"""
    down: torch.Tensor | None = None
    """[rank, inputs…]"""
    difference: torch.Tensor | None = None
    """[outputs, inputs…]"""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.up is not None and self.down is not None:
            return (self.up.shape[0], *self.down.shape[1:])
        assert self.difference is not None
        return tuple(self.difference.shape)

    def added_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """float32: whoever rounds it then rounds once."""
        total = tensor.float()
        if self.up is not None and self.down is not None:
            total = total + torch.tensordot(self.up, self.down, dims=1)
        return total if self.difference is None else total + self.difference


class WeightChanges(Protocol):
    """By the names that tensors have in the checkpoint."""

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str) -> WeightChange: ...

    def close(self) -> None: ...


class MergedSource:
    """A checkpoint whose tensors have the changes in them, made on the host as they are read."""

    def __init__(self, source: WeightSource, changes: WeightChanges) -> None:
        self._source = source
        self._changes = changes

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        return self._changes.read(name).added_to(tensor) if name in self._changes else tensor

    def close(self) -> None:
        self._changes.close()
        self._source.close()


def merging(changes: WeightChanges) -> AfterWrite:
    """For `load_weights`: adds each tensor's change where the tensor lies, as soon as it lies there."""

    def after_write(slot: WeightSlot, position: int, array: jax.Array) -> jax.Array:
        name = slot.sources[position]
        return merge(array, slot, position, changes.read(name)) if name in changes else array

    return after_write


def merge(array: jax.Array, slot: WeightSlot, position: int, change: WeightChange) -> jax.Array:
    """The slot's array with a change added to one of its sources. The memory of `array` is taken over."""
    layered = change.shape != slot.shape
    spec: tuple[Any, ...] = (*slot.sharding.spec, *[None] * (len(slot.shape) - len(slot.sharding.spec)))
    rows, *columns = spec[1:] if layered else spec
    up, down = _padded(change)
    parts = ((up, (rows,)), (down, (None, *columns)), (change.difference, (rows, *columns)))
    # Cut as the weight is: each device makes its own piece of the product, and nothing goes between them.
    placed = [None if part is None else _place(part, slot.sharding, axes) for part, axes in parts]
    # Until then the devices may read from host memory that is about to go.
    return _merger(slot.sharding, layered)(array, np.int32(position), *placed).block_until_ready()


def _padded(change: WeightChange) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Ranks up to a power of two, with zeros: or every rank, and every sum of ranks, would compile its own program."""
    if change.up is None or change.down is None:
        return None, None
    rank = change.up.shape[1]
    more = max(RANK_MIN, 1 << (rank - 1).bit_length()) - rank
    down = torch.cat([change.down, change.down.new_zeros(more, *change.down.shape[1:])])
    return torch.nn.functional.pad(change.up, (0, more)), down


def _place(part: torch.Tensor, sharding: NamedSharding, axes: tuple[Any, ...]) -> jax.Array:
    return put(part, np.dtype(np.float32), NamedSharding(sharding.mesh, PartitionSpec(*axes)), keep=False)


@functools.cache  # jit compiles once per function object: another LoRA of the same rank must compile nothing
def _merger(sharding: NamedSharding, layered: bool) -> Callable[..., jax.Array]:
    def merge(
        array: jax.Array,
        position: jax.Array,
        up: jax.Array | None,
        down: jax.Array | None,
        difference: jax.Array | None,
    ) -> jax.Array:
        dtype = array.dtype
        # As integers, for the reason that weights.py has: of a stack in bfloat16 only one layer is to be float32.
        bits = {2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
        stack = jax.lax.bitcast_convert_type(array, bits)
        layer = jax.lax.dynamic_index_in_dim(stack, position, 0, keepdims=False) if layered else stack
        total = jax.lax.bitcast_convert_type(layer, dtype).astype(jnp.float32)
        if up is not None and down is not None:
            total += jnp.tensordot(up, down, axes=1, precision=jax.lax.Precision.HIGHEST)
        if difference is not None:
            total += difference
        changed = jax.lax.bitcast_convert_type(total.astype(dtype), bits)
        if layered:
            changed = jax.lax.dynamic_update_index_in_dim(stack, changed, position, 0)
        return jax.lax.bitcast_convert_type(changed, dtype)

    return jax.jit(merge, donate_argnums=0, out_shardings=sharding)
