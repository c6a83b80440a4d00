"""Adds changes such as LoRA's to weights: on their devices, or on the host if the weights are quantized afterwards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from comfy_tpu.compiler.weights import SourceWrapper, WeightSource, put

RANK_MIN = 16


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """DoRA: a weight becomes its direction after `difference` is added, times `magnitude`."""

    difference: torch.Tensor
    """[outputs, inputs…]"""
    magnitude: torch.Tensor
    """A number for each output, [outputs, 1…], or input, [1, inputs, 1…]."""
    strength: float
    """The share of the change of the weight that is added."""

    def change(self, weight: torch.Tensor) -> torch.Tensor:
        # The norm is that of the sum, as PEFT and LyCORIS train it. ComfyUI takes the weight's own for outputs.
        total = weight + self.difference
        normed = [axis for axis, size in enumerate(self.magnitude.shape) if size == 1]
        norm = torch.linalg.vector_norm(total, dim=normed, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)
        return self.strength * (total * (self.magnitude / norm) - weight)


@dataclasses.dataclass(frozen=True)
class WeightChange:
    """The change that is added to one tensor of a checkpoint: the sum of its parts. All are float32."""

    up: torch.Tensor | None = None
    """[outputs, rank]"""
    down: torch.Tensor | None = None
    """[rank, inputs…]"""
    difference: torch.Tensor | None = None
    """[outputs, inputs…]"""
    decompositions: tuple[Decomposition, ...] = ()
    """They need the weight itself, so such changes are added on the host."""
    replacement: torch.Tensor | None = None
    """[outputs, inputs…], in place of the weight before the rest is added; on the host, too."""

    @property
    def bound(self) -> float:
        """An upper bound of the magnitude of every number in the change; NaN or infinity if the factors hold one."""

        def largest(tensor: torch.Tensor) -> float:
            return float(tensor.abs().max()) if tensor.numel() else 0.0

        bound = 0.0 if self.difference is None else largest(self.difference)
        if self.up is not None and self.down is not None:
            bound += largest(self.up) * largest(self.down) * self.up.shape[1]
        for each in self.decompositions:
            bound += largest(each.difference) + largest(each.magnitude) * abs(each.strength)
        return bound if self.replacement is None else bound + largest(self.replacement)

    def add_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum in float32, so that the caller rounds once."""
        weight = tensor.float() if self.replacement is None else self.replacement
        total = weight
        if self.up is not None and self.down is not None:
            total = total + torch.tensordot(self.up, self.down, dims=1)
        if self.difference is not None:
            total = total + self.difference
        for each in self.decompositions:
            total = total + each.change(weight)
        return total


class WeightChanges(Protocol):
    """Changes by the names that tensors have in the checkpoint."""

    @property
    def reads_weights(self) -> bool:
        """Whether a change depends on the weight or replaces it, so that all are added on the host."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str) -> WeightChange: ...

    def close(self) -> None: ...


class MergedSource(SourceWrapper):
    """A checkpoint with the changes added to its tensors on the host, as they are read."""

    def __init__(self, source: WeightSource, changes: WeightChanges) -> None:
        super().__init__(source)
        self._changes = changes

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        return self._changes.read(name).add_to(tensor) if name in self._changes else tensor

    def close(self) -> None:
        self._changes.close()
        super().close()


class DeviceMerge:
    """The changer of `load_weights` that adds each tensor's change on its devices, before its layer is stacked."""

    def __init__(self, changes: WeightChanges) -> None:
        self._changes = changes

    def __contains__(self, name: object) -> bool:
        return name in self._changes

    def __call__(self, name: str, array: jax.Array) -> jax.Array:
        return merge(array, self._changes.read(name))


def merge(array: jax.Array, change: WeightChange) -> jax.Array:
    """A weight with its change, in the same dtype and place.

    Merged before it is written into its stack: a program that reads a layer of a stack and writes it back copies the
    whole stack first (30 layers of 1536 × 1536 in bfloat16, rank 64, two CPU cores: 142 MB and 2.0 s, against 9 MB and
    0.6 s).
    """
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    axes: list[Any] = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    rows, columns = axes[0], axes[1:]
    up, down = _pad_rank(change)
    parts = ((up, (rows,)), (down, (None, *columns)), (change.difference, (rows, *columns)))
    # Cut as the weight is: each device makes its own piece of the product, and nothing goes between them.
    placed = [None if part is None else _place(part, sharding, cut) for part, cut in parts]
    # Until then the devices may read from host memory that is about to go.
    return _merger(sharding)(array, *placed).block_until_ready()


def _pad_rank(change: WeightChange) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Pads the rank with zeros to a power of two: otherwise every rank, and every sum of ranks, would be compiled."""
    if change.up is None or change.down is None:
        return None, None
    rank = change.up.shape[1]
    more = max(RANK_MIN, 1 << (rank - 1).bit_length()) - rank
    down = torch.cat([change.down, change.down.new_zeros(more, *change.down.shape[1:])])
    return torch.nn.functional.pad(change.up, (0, more)), down


def _place(part: torch.Tensor, sharding: NamedSharding, axes: tuple[Any, ...]) -> jax.Array:
    return put(part, np.dtype(np.float32), NamedSharding(sharding.mesh, PartitionSpec(*axes)), keep=False)


@functools.cache  # jit compiles once per function object: another LoRA of the same rank must compile nothing
def _merger(sharding: NamedSharding) -> Callable[..., jax.Array]:
    def merge(
        array: jax.Array, up: jax.Array | None, down: jax.Array | None, difference: jax.Array | None
    ) -> jax.Array:
        total = array.astype(jnp.float32)
        if up is not None and down is not None:
            total += jnp.tensordot(up, down, axes=1, precision=jax.lax.Precision.HIGHEST)
        if difference is not None:
            total += difference
        return total.astype(array.dtype)

    # Not donated: on a CPU the array may be the mapped checkpoint itself. It is one layer, and goes when this is done.
    return jax.jit(merge, out_shardings=sharding)
