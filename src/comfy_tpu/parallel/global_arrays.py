"""Arrays over the devices of several processes, of which each process holds only its own shards.

Every process runs the same program on the same host data, so an array is put without a word between them, and fetched
by a gather that all of them take part in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def put_global(value: np.ndarray, sharding: Sharding | None) -> jax.Array:
    """Puts host data, the same in every process, on the devices of a sharding; each process puts its own shards.

    `jax.device_put` would compare the value over the network first, a program and a collective per shape.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def move_global(array: jax.Array, sharding: Sharding | None) -> jax.Array:
    """Puts an array, the same in every process, on the devices of a sharding."""
    if array.sharding == sharding and array.committed:
        return array  # what `jax.device_put` takes 40 to 60 µs to find out, for every array of every step
    if sharding is None or sharding.is_fully_addressable or not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    return put_global(np.asarray(array), sharding)


def fetch_global(array: jax.Array) -> jax.Array:
    """The whole array on devices of this process. A collective where it is split over processes: all must call it."""
    if array.is_fully_addressable:
        return array
    if not array.is_fully_replicated:
        assert isinstance(array.sharding, NamedSharding)
        array = _gatherer(array.sharding)(array)
    # On all devices of this process, not on the first alone: at the end of a run another process could leave while one
    # of them still waits for it in a collective, for ever.
    return array.block_until_ready().addressable_data(0)


@functools.cache  # jit compiles once per function object
def _gatherer(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
