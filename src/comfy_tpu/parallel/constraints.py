"""Sharding constraints on arrays inside a compiled program."""

from __future__ import annotations

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from comfy_tpu.errors import ShardingError
from comfy_tpu.parallel.placement import Placement

Axes = tuple[str | tuple[str, ...] | None, ...]
"""How the dimensions of an array are split: a mesh axis, several of them, or None for each."""


def constrain(array: jax.Array, placement: Placement, spec: PartitionSpec) -> jax.Array:
    """Constrains an array to be split by `spec`. Inside jit, axes need not divide their dimensions."""
    _check(array, placement, spec)
    if placement.sizes.device_count == 1:
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(placement.mesh, spec))


def even_batch_spec(axes: Axes, shape: tuple[int, ...], placement: Placement) -> PartitionSpec:
    """The axes as a spec for an array of this shape, without dp if dp does not divide the batch.

    A batch of one over dp=2 would be padded to two and computed twice over, with the collectives of both.
    """
    return PartitionSpec(
        *(None if axis == "dp" and size % placement.sizes.dp else axis for axis, size in _pairs(axes, shape))
    )


def even_spec(axes: Axes, shape: tuple[int, ...], placement: Placement) -> PartitionSpec:
    """The axes as a spec without every axis that does not divide its dimension, as `jax.device_put` requires."""
    sizes = dict(placement.mesh.shape)
    return PartitionSpec(
        *(None if size % math.prod(sizes[a] for a in _names(axis)) else axis for axis, size in _pairs(axes, shape))
    )


def _pairs(axes: Axes, shape: tuple[int, ...]) -> zip[tuple[str | tuple[str, ...] | None, int]]:
    return zip(axes, shape, strict=False)


def _names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(axis, str):
        return (axis,)
    return axis if isinstance(axis, tuple) else ()  # None, or PartitionSpec.UNCONSTRAINED


def _check(array: jax.Array, placement: Placement, spec: PartitionSpec) -> None:
    if len(spec) > array.ndim:
        raise ShardingError(
            f"constraint {spec} names {len(spec)} dimensions but the array has {array.ndim}, shape {array.shape}; "
            "give at most one entry per dimension"
        )
    sizes = dict(placement.mesh.shape)
    used: list[str] = []
    for dimension, entry in enumerate(spec):
        ways = 1
        for axis in _names(entry):
            if axis not in sizes:
                raise ShardingError(f"constraint {spec}: unknown mesh axis {axis!r}; choose from {', '.join(sizes)}")
            if axis in used:
                raise ShardingError(f"constraint {spec}: axis {axis!r} is used twice; use each axis once")
            used.append(axis)
            ways *= sizes[axis]
        # Only the compiler can pad: an array that already exists must divide.
        if array.shape[dimension] % ways and not isinstance(array, jax.core.Tracer):
            raise ShardingError(
                f"constraint {spec}: dimension {dimension} is {array.shape[dimension]}, not divisible by {ways}; "
                "outside jax.jit sizes must divide, so call constrain inside the compiled function"
            )
