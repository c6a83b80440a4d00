"""Shared memory of traced tensors: a write into a tensor is visible in every view of the same memory, as in torch.

torchax gives every tensor an array of its own, `_elem`. Here that is a property: reading it gives what the tensor would
hold in torch, and assigning to it writes through to the memory, whoever does it (torchax's in-place operators do).
A tensor holds its memory, a memory holds no tensor: nothing outlives the trace.
"""

from __future__ import annotations

import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bridge.compat import load_torchax
from comfy_tpu.bridge.layouts import ROW_MAJOR, Layout, Shape
from comfy_tpu.bridge.model_source import calling_line
from comfy_tpu.bridge.recipes import DynamicIndex, Index, Recipe, is_basic, writable_recipes
from comfy_tpu.errors import TraceError, see


class Memory:
    __slots__ = ("__weakref__", "alias_checked_from", "possible_alias", "value", "version")

    def __init__(self, value: jax.Array) -> None:
        self.value = value
        self.version = 0
        self.possible_alias: PossibleAlias | None = None
        self.alias_checked_from = 0


class PossibleAlias:
    """Memories that torch would or would not share, depending on strides that the trace does not know."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.writers: list[int] = []

    def add(self, memory: Memory) -> None:
        memory.possible_alias, memory.alias_checked_from = self, len(self.writers)

    def check(self, memory: Memory) -> None:
        """Raises TraceError if another of the memories was written since `memory` was added: the value read now depends
        on whether torch shares them."""
        if any(writer != id(memory) for writer in self.writers[memory.alias_checked_from :]):
            raise TraceError(
                f"{self.reason} gives a view or a copy depending on strides, which a trace does not know here; one of "
                f"the two was written to, and the other is read{calling_line()}; write .clone() if it is to be a "
                f"copy, .view() if it is not{see('shared-memory')}"
            )


def mark_possible_alias(one: Any, other: Any, what: str) -> None:
    memory = one._memory
    if memory.possible_alias is None:
        PossibleAlias(f"{what}{calling_line()}").add(memory)
    memory.possible_alias.add(other._memory)


def make_view(parent: Any, recipe: Recipe, view: Any = None, layout: Layout = None) -> Any:
    """A view of `parent` through `recipe`: a new tensor, or `view`, which holds the value already."""
    if view is None:
        view = type(parent)(recipe.read(parent._elem), parent._env)
    view._memory, view._seen = parent._memory, parent._memory.version
    view._recipes = (*parent._recipes, recipe)
    view._layout = layout or recipe.layout(parent._layout, tuple(parent._value.shape))
    return view


def rebind_memory(tensor: Any, other: Any) -> None:
    """Makes `tensor` share the memory and shape of `other`: `tensor.data = other`, `tensor.unsqueeze_(0)`."""
    resized = tensor._value.shape != other._value.shape
    for name in ("_memory", "_recipes", "_value", "_seen", "_layout"):
        setattr(tensor, name, getattr(other, name))
    if resized:  # what C++ knows of its shape
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.resize_(tensor, tuple(tensor._value.shape))


def _initialize(self: Any, elem: jax.Array, env: Any, requires_grad: bool = False) -> None:
    self._memory = Memory(elem)
    self._recipes = ()
    self._value, self._seen = elem, 0
    self._layout = ROW_MAJOR
    self._env = env


def _read(self: Any) -> jax.Array:
    memory: Memory = self._memory
    if memory.possible_alias is not None:
        memory.possible_alias.check(memory)
    if self._seen == memory.version:
        value: jax.Array = self._value
        return value
    # Not kept: this may be inside the body of a scan, and the next read outside of it.
    value = memory.value
    for recipe in self._recipes:
        value = recipe.read(value)
    return value


def _write(self: Any, value: jax.Array) -> None:
    memory: Memory = self._memory
    if value.dtype != self._value.dtype:
        value = value.astype(self._value.dtype)
    if value.shape != self._value.shape:
        value = _broadcast(value, tuple(self._value.shape))
    recipes = writable_recipes(self._recipes)
    parents = [memory.value]
    for recipe in recipes[:-1]:
        parents.append(recipe.read(parents[-1]))
    written = value
    for recipe, parent in zip(reversed(recipes), reversed(parents), strict=False):
        written = recipe.write(parent, written)
    memory.value = written
    memory.version += 1
    self._value, self._seen = value, memory.version
    if memory.possible_alias is not None:
        memory.possible_alias.writers.append(id(memory))


def _broadcast(value: jax.Array, shape: Shape) -> jax.Array:
    if value.ndim > len(shape) and math.prod(value.shape[: value.ndim - len(shape)]) == 1:
        value = value.reshape(value.shape[value.ndim - len(shape) :])
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise TraceError(
            f"a value of shape {tuple(value.shape)} was written into a tensor of shape {shape}{calling_line()}; they "
            "must be the same up to broadcasting"
        ) from None


def get_item(tensor: Any, key: Any) -> Any:
    """`tensor[key]`: a view where torch returns a view (integers, slices), a copy where it gathers (lists, masks)."""
    parts = _index_parts(key)
    if all(map(is_basic, parts)):
        return make_view(tensor, Index(parts, tuple(tensor._value.shape)))
    arrays = tensor._env.t2j_iso(parts)
    if all(is_basic(part) or _is_integer(part) for part in arrays):
        return make_view(tensor, DynamicIndex(arrays))
    gathered = type(tensor)(tensor._elem[arrays], tensor._env)
    gathered._layout = None
    return gathered


def set_item(tensor: Any, key: Any, value: Any) -> None:
    parts = tensor._env.t2j_iso(_index_parts(key))
    current = tensor._elem
    array = jnp.asarray(tensor._env.t2j_iso(value)).astype(current.dtype)  # JAX will refuse another dtype
    if not all(map(is_basic, parts)):
        if len(parts) == 1 and getattr(parts[0], "dtype", None) == jnp.bool_:
            jaten = load_torchax().ops.jaten
            tensor._elem = jaten._shape_static_boolean_index_put(current, parts[0], array, is_sequential=False)
        else:
            tensor._elem = current.at[parts].set(array)
        return
    index = Index(parts, tuple(current.shape))
    shape = jax.eval_shape(index.read, current).shape
    tensor._elem = index.write(current, array if array.shape == shape else _broadcast(array, shape))


def _is_integer(part: Any) -> bool:
    return isinstance(part, jax.Array) and part.ndim == 0 and jnp.issubdtype(part.dtype, jnp.integer)


def _index_parts(key: Any) -> tuple[Any, ...]:
    if isinstance(key, list) and any(isinstance(part, (slice, torch.Tensor, type(None))) for part in key):
        key = tuple(key)  # as torch reads it
    return tuple(_as_python_number(part) for part in (key if isinstance(key, tuple) else (key,)))


def _as_python_number(part: Any) -> Any:
    """A number of numpy, or of a one-element host tensor, as a Python int; anything else unchanged."""
    if isinstance(part, slice):
        return slice(*(_as_python_number(bound) for bound in (part.start, part.stop, part.step)))
    if isinstance(part, (bool, list, tuple)) or hasattr(part, "_memory") or not hasattr(part, "__index__"):
        return part
    is_number = not getattr(part, "ndim", 0) and "bool" not in str(getattr(part, "dtype", ""))
    return part.__index__() if is_number and not isinstance(part, jax.Array) else part


def patch_tensor_class(tensor: types.ModuleType) -> None:
    """Replaces methods and properties of torchax's Tensor class, so that views share memory."""
    cls = tensor.Tensor
    cls.__init__ = _initialize
    cls._elem = property(_read, _write)
    cls.data = property(lambda self: self, rebind_memory)
    # A view keeps its shape and dtype: asking for them must not read it again.
    cls.shape = property(lambda self: torch.Size(self._value.shape))
    cls.ndim = property(lambda self: len(self._value.shape))
    cls.dtype = property(lambda self: tensor.mappings.j2t_dtype(self._value.dtype))
    # As methods they would go past every torch function mode.
    for name in ("__setitem__", "detach", "flatten"):
        if name in vars(cls):
            delattr(cls, name)
