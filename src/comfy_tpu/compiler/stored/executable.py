"""Compiled programs from the entries of JAX's cache. No pickle: what JAX keeps in Python objects is written as JSON.

`jax.experimental.serialize_executable` writes both with pickle. Bytes are taken from the cache because an executable
that was itself read from there cannot be serialised again (jaxlib 0.10.2, CPU: "Function add_select_fusion not found"
when it runs).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from comfy_tpu.compiler.stored.identity import NotDescribableError


class StoredExecutable:
    """A program that was read from the store; called as `jax.stages.Compiled` is, with the arguments of its tracing."""

    def __init__(self, header: Mapping[str, Any], serialized: bytes, mesh: Mesh) -> None:
        """`header`: that of `describe_calls`. `serialized`: as `read_cache_entry` returns it."""
        from jaxlib import _jax

        devices = tuple(mesh.devices.flat)
        if devices[0].platform == "gpu" and b"mosaic_gpu" in serialized:
            # Tells XLA where the functions are that the host part of a Pallas kernel calls; tracing one does it, too.
            importlib.import_module("jax.experimental.mosaic.gpu")
        self._executable = devices[0].client.deserialize_executable(
            serialized, executable_devices=_jax.DeviceList(devices)
        )
        self._kept = frozenset(header["kept"])
        self._outputs = [
            (tuple(output["shape"]), np.dtype(output["dtype"]), _read_sharding(output["sharding"], mesh))
            for output in header["outputs"]
        ]
        self._structure = jax.tree.structure(_read_tree(header["tree"]), is_leaf=lambda node: node == _LEAF)

    def __call__(self, *arguments: Any) -> Any:
        leaves = [leaf for index, leaf in enumerate(jax.tree.leaves(arguments)) if index in self._kept]
        # Each output as one array a device, without a copy.
        parts = self._executable.execute_sharded(leaves).disassemble_into_single_device_arrays()
        outputs = [
            jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
            for (shape, dtype, sharding), arrays in zip(self._outputs, parts, strict=True)
        ]
        return jax.tree.unflatten(self._structure, outputs)

    def cost_analysis(self) -> Mapping[str, float]:
        """XLA's own count of operations and bytes."""
        costs: Mapping[str, float] = self._executable.cost_analysis()
        return costs

    def as_text(self) -> str:
        """The optimized HLO."""
        return "\n".join(module.to_string() for module in self._executable.hlo_modules())


def read_cache_entry(content: bytes) -> bytes:
    """The serialised executable in a file of JAX's cache, without the time that it took to compile."""
    from jax._src import compilation_cache

    serialized, _ = compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(content))
    return serialized


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def describe_calls(compiled: jax.stages.Compiled, mesh: Mesh) -> dict[str, Any]:
    """How a compiled program over `mesh` is called, as JSON data; NotDescribableError if it takes or gives more than
    arrays."""
    executable: Any = compiled._executable
    call = executable.unsafe_call
    if compiled._params.const_args or call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        raise NotDescribableError("a program with constants, effects or callbacks outside of it")
    if call.mut is not None or any(aval.weak_type for aval in executable.out_avals):
        raise NotDescribableError("a program with references, or with outputs of a weak type")
    shardings: Sequence[Any] = jax.tree.leaves(compiled.output_shardings)
    outputs = [
        {"shape": list(aval.shape), "dtype": aval.dtype.name, "sharding": _write_sharding(sharding, mesh)}
        for aval, sharding in zip(executable.out_avals, shardings, strict=True)
    ]
    tree = _write_tree(jax.tree.unflatten(compiled.out_tree, [_LEAF] * len(outputs)))
    return {"kept": sorted(executable._kept_var_idx), "outputs": outputs, "tree": tree}


def _write_sharding(sharding: Any, mesh: Mesh) -> list[Any]:
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        raise NotDescribableError(f"an output with a {type(sharding).__name__} over other devices")
    return [[list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec], sharding.memory_kind]


def _read_sharding(written: Sequence[Any], mesh: Mesh) -> NamedSharding:
    spec, memory_kind = written
    axes = [tuple(each) if isinstance(each, list) else each for each in spec]
    return NamedSharding(mesh, PartitionSpec(*axes), memory_kind=memory_kind)


_LEAF = "array"


def _write_tree(tree: Any) -> Any:
    """A tree of dicts, lists and tuples with `_LEAF` in place of arrays, as JSON."""
    if tree == _LEAF or tree is None:
        return tree
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {"dict": {name: _write_tree(each) for name, each in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_write_tree(each) for each in tree]}
    raise NotDescribableError(f"outputs in a {type(tree).__name__}")


def _read_tree(written: Any) -> Any:
    if not isinstance(written, Mapping):
        return written
    ((kind, content),) = written.items()
    if kind == "dict":
        return {name: _read_tree(each) for name, each in content.items()}
    return {"list": list, "tuple": tuple}[kind](map(_read_tree, content))
