"""Weights from a checkpoint straight into their sharded places: host memory holds a few tensors, never the model."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from comfy_tpu.bridge.boundary import alias_torch_tensor, is_on_one_gpu
from comfy_tpu.bridge.dtypes import as_numpy
from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.compiler.stored import ProgramStore
from comfy_tpu.compiler.stored.functions import compile_function
from comfy_tpu.errors import CheckpointError, join_names
from comfy_tpu.parallel.global_arrays import put_global
from comfy_tpu.quiet import quiet

logger = logging.getLogger(__name__)

_LISTED = 3

HOST_STACK_BYTES = 4 * 2**20
"""A stack of at most this size is filled on the host, a larger one on its devices. The compiled program that writes a
layer costs 0.1 s per shape, more than copying a few MiB. All small stacks of a model are in host memory at once: 8 MB
of Wan 14B's transformer."""

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read."""


class WeightChanger(Protocol):
    """Replaces some tensors of a checkpoint after they are put on their devices."""

    def __contains__(self, name: object) -> bool:
        """Whether the tensor of this name in the checkpoint is replaced."""
        ...

    def __call__(self, name: str, array: jax.Array) -> jax.Array:
        """The array that replaces `array`, with the same dtype and sharding."""
        ...


class WeightSource(Protocol):
    """Where tensors come from: a `Checkpoint`, or a module in host memory."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def close(self) -> None: ...


class SourceWrapper:
    """A source that wraps another one. Subclasses override `read` to change names, dtypes or values."""

    def __init__(self, source: WeightSource, tensors: Mapping[str, TensorInfo] | None = None) -> None:
        self._source = source
        self.tensors = source.tensors if tensors is None else tensors

    @property
    def path(self) -> Path:
        return self._source.path

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(name)

    def close(self) -> None:
        self._source.close()


@dataclasses.dataclass(frozen=True)
class WeightSlot:
    """A weight that a program needs, and the tensors of a checkpoint that it is loaded from.

    A plain weight has one source of the same shape; a stacked weight has one source per entry of the leading (layer)
    dimension, in order. The shape distinguishes a stack of one layer from a plain weight.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding

    @property
    def bytes_per_device(self) -> int:
        return math.prod(self.sharding.shard_shape(self.shape)) * np.dtype(self.dtype).itemsize


def abstract_weights(slots: Iterable[WeightSlot]) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights without their values: enough to trace, lower and compile."""
    return {slot.name: jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=slot.sharding) for slot in slots}


def load_weights(
    checkpoint: WeightSource,
    slots: Sequence[WeightSlot],
    *,
    on_progress: ProgressCallback | None = None,
    ignore_unused: Sequence[str] = (),
    change: WeightChanger | None = None,
    store: ProgramStore | None = None,
) -> dict[str, jax.Array]:
    """Loads every slot as an array on its devices. `ignore_unused`: globs of tensors that no slot needs. `store`: has
    the small programs that write layers into stacks.

    Everything that headers can tell is checked before a byte is read. If anything is raised, by on_progress too,
    what was already loaded is deleted.
    """
    check_checkpoint(checkpoint, slots, ignore_unused)
    writes = _writes_in_file_order(checkpoint, slots)
    total = sum(checkpoint.tensors[slot.sources[position]].nbytes for slot, position in writes)
    done = 0
    arrays: dict[str, jax.Array] = {}
    host_stacks = {slot.name: _HostStack(slot) for slot in slots if _is_stacked_on_host(slot, checkpoint, change)}
    transfers = _Transfers()
    try:
        if on_progress:
            on_progress(0, total)  # the first tensor may be a table of 2 GB
        with quiet():
            for slot, position in writes:
                if stack := host_stacks.get(slot.name):
                    stack.fill(position, checkpoint.read(slot.sources[position]))
                    if stack.is_complete:
                        arrays[slot.name] = transfers.add(host_stacks.pop(slot.name).put())
                else:
                    stack_array = arrays.get(slot.name)
                    arrays[slot.name] = _write(checkpoint, slot, position, stack_array, transfers, change, store)
                done += checkpoint.tensors[slot.sources[position]].nbytes
                if on_progress:
                    on_progress(done, total)
            jax.block_until_ready(arrays)
    except BaseException:
        for array in arrays.values():
            array.delete()
        raise
    finally:
        checkpoint.close()
    logger.info("loaded %d weights, %.2f GB, from %s", len(arrays), total / 1e9, checkpoint.path)
    return {slot.name: arrays[slot.name] for slot in slots}


def move_weights(arrays: dict[str, jax.Array], slots: Sequence[WeightSlot]) -> dict[str, jax.Array]:
    """Weights of another mesh over the same devices in the places of `slots`, one after the other.

    `arrays` is emptied, so that each array is freed as soon as it is moved. None is deleted: where a weight is in its
    place already, the result is made of the same buffers.
    """
    return {slot.name: jax.device_put(arrays.pop(slot.name), slot.sharding).block_until_ready() for slot in slots}


def update_weights(
    source: WeightSource, slots: Sequence[WeightSlot], arrays: dict[str, jax.Array], changed: Collection[str]
) -> int:
    """Writes the `changed` tensors of a source into arrays that `load_weights` made; returns the bytes moved.

    If anything is raised, the arrays are no longer those of any source: delete them.
    """
    moved, transfers = 0, _Transfers()
    with quiet():
        for slot in slots:
            for position, name in enumerate(slot.sources):
                if name in changed:
                    # A whole weight gets a new array; a layer is written into its stack, which is then another array.
                    arrays[slot.name] = _write(source, slot, position, arrays[slot.name], transfers)
                    moved += source.tensors[name].nbytes
        jax.block_until_ready(arrays)
    return moved


class _Transfers:
    """The tensor that is on its way to the devices, while the next one is read, checked and converted.

    No more than one: until a transfer is over the devices may read from the mapped file, which stays mapped with all
    its pages.
    """

    def __init__(self) -> None:
        self._last: jax.Array | None = None

    def add(self, array: jax.Array) -> jax.Array:
        jax.block_until_ready(self._last)
        self._last = array
        return array


def _is_stacked_on_host(slot: WeightSlot, source: WeightSource, change: WeightChanger | None) -> bool:
    is_stack = source.tensors[slot.sources[0]].shape != slot.shape
    nbytes = math.prod(slot.shape) * np.dtype(slot.dtype).itemsize
    is_changed = change is not None and any(name in change for name in slot.sources)
    return is_stack and nbytes <= HOST_STACK_BYTES and not is_changed


class _HostStack:
    """The layers of one slot, in host memory until all of them are read."""

    def __init__(self, slot: WeightSlot) -> None:
        self._slot = slot
        self._missing = set(range(len(slot.sources)))
        self._layers = torch.empty(slot.shape, dtype=getattr(torch, np.dtype(slot.dtype).name))

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def fill(self, position: int, layer: torch.Tensor) -> None:
        self._layers[position].copy_(layer)
        self._missing.discard(position)

    def put(self) -> jax.Array:
        return put(self._layers, self._slot.dtype, self._slot.sharding, keep=True)


def _write(
    checkpoint: WeightSource,
    slot: WeightSlot,
    position: int,
    stack: jax.Array | None,
    transfers: _Transfers,
    change: WeightChanger | None = None,
    store: ProgramStore | None = None,
) -> jax.Array:
    """The slot's array with one more of its sources written into it."""
    tensor = checkpoint.read(slot.sources[position])
    whole = tuple(tensor.shape) == slot.shape
    array = put(tensor, slot.dtype, slot.sharding if whole else _layer_sharding(slot.sharding), keep=whole)
    if change is not None and slot.sources[position] in change:
        array = change(slot.sources[position], array)
    transfers.add(array)
    if not whole:
        made = (slot.shape, np.dtype(slot.dtype), slot.sharding, store)
        if stack is None:
            stack = _zeros(*made)()
        place = put_global(np.array(position, np.int32), NamedSharding(slot.sharding.mesh, PartitionSpec()))
        array = _layer_writer(*made)(stack, array, place)
    return array


def _writes_in_file_order(checkpoint: WeightSource, slots: Sequence[WeightSlot]) -> list[tuple[WeightSlot, int]]:
    # Layer by layer as they lie on the disk, not slot by slot: a network disk is several times faster in sequence.
    order = {name: number for number, name in enumerate(checkpoint.tensors)}
    writes = [(slot, position) for slot in slots for position in range(len(slot.sources))]
    return sorted(writes, key=lambda write: order[write[0].sources[write[1]]])


def put(tensor: torch.Tensor, dtype: np.dtype, sharding: NamedSharding, *, keep: bool) -> jax.Array:
    """Puts a tensor on its devices. `keep`: whether the array outlives the mapped file that the tensor is a view of."""
    target = getattr(torch, np.dtype(dtype).name)
    if tensor.is_cuda and is_on_one_gpu(sharding):
        return alias_torch_tensor(tensor.to(target), sharding)
    tensor = tensor.cpu()
    if keep and sharding.mesh.devices.flat[0].platform == "cpu":
        # CPU devices take over host memory that is aligned to 64 bytes instead of copying it, so an array could turn
        # out to be the mapped file. torch aligns: its one copy per shard is taken over, not copied again.
        def piece(index: Any) -> np.ndarray:
            return as_numpy(tensor[index].to(target, copy=True, memory_format=torch.contiguous_format))
    elif not sharding.is_fully_addressable:
        # Cut first: a process reads only its own shards of the file, one of them once for all its devices.
        pieces: dict[str, np.ndarray] = {}

        def piece(index: Any) -> np.ndarray:
            key = str(index)
            if key not in pieces:
                pieces[key] = as_numpy(tensor[index].to(target))
            return pieces[key]
    else:
        whole = as_numpy(tensor.to(target))

        def piece(index: Any) -> np.ndarray:
            return whole[index]

    return jax.make_array_from_callback(tuple(tensor.shape), sharding, piece)


@functools.cache
def _zeros(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, store: ProgramStore | None
) -> Callable[[], jax.Array]:
    def make() -> jax.Array:
        return jnp.zeros(shape, dtype)

    return compile_function(store, "weights.zeros", make, (), sharding.mesh, out_shardings=sharding)


@functools.cache
def _layer_writer(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, store: ProgramStore | None
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    def write(stack: jax.Array, layer: jax.Array, position: jax.Array) -> jax.Array:
        # As integers: on CPU, XLA converts the whole stack to float32 and back for every layer it writes in bfloat16
        # (40 layers of 8 MB: 2.9 s against 0.04 s) or float8 (75 s). Donated, so the stack is written in place.
        dtype = stack.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[dtype.itemsize]
            stack, layer = (jax.lax.bitcast_convert_type(array, bits) for array in (stack, layer))
        stack = jax.lax.dynamic_update_index_in_dim(stack, layer, position, 0)
        return stack if stack.dtype == dtype else jax.lax.bitcast_convert_type(stack, dtype)

    arguments = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        jax.ShapeDtypeStruct(shape[1:], dtype, sharding=_layer_sharding(sharding)),
        jax.ShapeDtypeStruct((), np.dtype("int32"), sharding=NamedSharding(sharding.mesh, PartitionSpec())),
    )
    options = {"donate_argnums": 0, "out_shardings": sharding}
    return compile_function(store, "weights.write_layer", write, arguments, sharding.mesh, **options)


def _layer_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of one layer of a stack."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def check_checkpoint(checkpoint: WeightSource, slots: Sequence[WeightSlot], ignore_unused: Sequence[str] = ()) -> None:
    """Raises CheckpointError where names, shapes or dtypes in the headers are not those of the slots."""
    names = [slot.name for slot in slots]
    places = [f"two slots are named {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    for slot in slots:
        missing += [source for source in slot.sources if source not in checkpoint.tensors]
        present = [checkpoint.tensors[source] for source in slot.sources if source in checkpoint.tensors]
        places += _placement_problems(slot)
        shapes += [problem for info in present for problem in _shape_problems(slot, info)]
        dtypes += [problem for info in present for problem in _dtype_problems(slot, info)]
    used = {source for slot in slots for source in slot.sources}
    unused = [
        name
        for name in checkpoint.tensors
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore_unused)
    ]
    problems = []
    if missing and (prefix := _find_prefix(checkpoint.tensors, used)):
        problems.append(f"its names have the prefix {prefix}, the model's do not")
    problems += [join_names(found, _LISTED, separator="; ") for found in (places, shapes, dtypes) if found]
    if missing:
        problems.append(f"missing from the checkpoint: {join_names(missing, _LISTED)}")
    if unused:
        problems.append(f"in the checkpoint, but the model has no place for them: {join_names(unused, _LISTED)}")
    if problems:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} does not fit the model: {'; '.join(problems)}; nothing was loaded; check "
            "that the checkpoint and the model's config belong together"
        )


def _find_prefix(names: Collection[str], expected: Collection[str]) -> str:
    """The prefix that all names have, and without which one of them is expected; empty where there is none."""
    first = next(iter(names), "")
    for match in re.finditer(r"\.", first):
        prefix = first[: match.end()]
        is_shared = all(name.startswith(prefix) for name in names)
        is_own = any(name.startswith(prefix) for name in expected)
        if is_shared and not is_own and any(name.removeprefix(prefix) in expected for name in names):
            return prefix
    return ""


def _shape_problems(slot: WeightSlot, info: TensorInfo) -> list[str]:
    layered = (len(slot.sources), *info.shape) == slot.shape
    if layered or (len(slot.sources) == 1 and info.shape == slot.shape):
        return []
    expected = slot.shape if len(slot.sources) == 1 else slot.shape[1:]
    return [f"{info.name}: shape {info.shape} in the file, expected {expected} for {slot.name}"]


def _dtype_problems(slot: WeightSlot, info: TensorInfo) -> list[str]:
    if _kind(getattr(torch, np.dtype(slot.dtype).name)) == _kind(info.dtype):
        return []
    name = str(info.dtype).removeprefix("torch.")
    return [f"{info.name}: dtype {name} in the file, expected {np.dtype(slot.dtype).name} for {slot.name}"]


def _kind(dtype: torch.dtype) -> str:
    # Between floating types values only lose digits; between integers they could wrap, so those must be equal.
    return "floating" if dtype.is_floating_point else str(dtype)


def _placement_problems(slot: WeightSlot) -> list[str]:
    if not isinstance(slot.sharding.mesh, Mesh):
        return [f"{slot.name}: its mesh has no devices; load onto a placement made by make_placement"]
    if not slot.sources or (len(slot.sources) > 1 and slot.shape[:1] != (len(slot.sources),)):
        return [f"{slot.name}: {len(slot.sources)} sources for shape {slot.shape}; expected one per layer"]
    if len(slot.sources) > 1 and slot.sharding.spec and slot.sharding.spec[0] is not None:
        return [f"{slot.name}: its layer dimension is split ({slot.sharding.spec}); layers are written one at a time"]
    if jax.dtypes.canonicalize_dtype(slot.dtype) != slot.dtype:
        return [
            f"{slot.name}: jax holds no {np.dtype(slot.dtype).name} unless jax_enable_x64 is set; use a 32-bit type"
        ]
    try:
        slot.sharding.shard_shape(slot.shape)
    except ValueError as error:
        return [f"{slot.name}: shape {slot.shape} cannot be sharded ({error})"]
    return []
