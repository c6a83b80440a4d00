"""How a view is read from its parent, and how a write into the view changes the parent.

Values are moved and never computed with: NaN, infinities and all dtypes are preserved.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from comfy_tpu.bridge.layouts import Layout, Shape, layout_strides, view_layout
from comfy_tpu.errors import TraceError, see


class Recipe(Protocol):
    def read(self, parent: jax.Array) -> jax.Array: ...

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        """The parent with `value` written where `read` reads."""

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        """Strides of the view of a parent with this layout and shape."""


@dataclasses.dataclass(frozen=True)
class Reshape:
    """The same elements in the same order. `layouts.view_layout` decides whether torch makes a view or a copy."""

    shape: Shape

    def read(self, parent: jax.Array) -> jax.Array:
        return parent.reshape(self.shape)

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        return value.reshape(parent.shape)

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        return view_layout(parent, shape, self.shape)[1]


@dataclasses.dataclass(frozen=True)
class Permute:
    order: Shape

    def read(self, parent: jax.Array) -> jax.Array:
        return parent.transpose(self.order)

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        return value.transpose(sorted(range(len(self.order)), key=self.order.__getitem__))

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        strides = layout_strides(parent, shape)
        return strides and tuple(strides[dim] for dim in self.order)


@dataclasses.dataclass(frozen=True)
class Expand:
    shape: Shape

    def read(self, parent: jax.Array) -> jax.Array:
        return jnp.broadcast_to(parent, self.shape)

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        if math.prod(self.shape) != parent.size:
            raise TraceError(
                f"a tensor of shape {parent.shape}, expanded to {self.shape}, was written to: several of its elements "
                f"are one in memory; write into .clone() of it{see('shared-memory')}"
            )
        return value.reshape(parent.shape)

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        strides = layout_strides(parent, shape)
        if strides is None:
            return None
        added = len(self.shape) - len(shape)
        return (0,) * added + tuple(
            0 if size != self.shape[added + dim] else strides[dim] for dim, size in enumerate(shape)
        )


def is_basic(part: Any) -> bool:
    """Whether an index selects without a gather. True and False are masks, so they do not."""
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step))
    return part is None or part is Ellipsis or type(part) is int


class Index:
    """`parent[key]`, of integers, slices, None and an ellipsis."""

    def __init__(self, key: tuple[Any, ...], shape: Shape) -> None:
        self.key = key
        indexed = sum(1 for part in key if part is not None and part is not Ellipsis)
        if indexed > len(shape):
            raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
        rest = (slice(None),) * (len(shape) - indexed)
        place = key.index(Ellipsis) if Ellipsis in key else len(key)
        self._parts: tuple[Any, ...] = (*key[:place], *rest, *key[place + 1 :])
        self._ranges = [
            self._range(part, size) for part, size in zip((p for p in self._parts if p is not None), shape, strict=True)
        ]

    @staticmethod
    def _range(part: int | slice, size: int) -> range:
        if isinstance(part, int):
            if not -size <= part < size:
                raise IndexError(f"index {part} is out of bounds for a dimension of size {size}")
            return range(part % size, part % size + 1)
        if part.step is not None and part.step <= 0:
            raise ValueError("step must be greater than zero")
        return range(size)[part]

    def read(self, parent: jax.Array) -> jax.Array:
        return parent[self.key]

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        box = tuple(len(places) for places in self._ranges)
        value = value.reshape(box)
        if box == parent.shape or value.size == 0:
            return value if value.size else parent
        partial = [dim for dim, size in enumerate(parent.shape) if box[dim] != size]
        places = self._ranges[partial[0]]
        if len(partial) == 1 and (places.step == 1 or len(places) == 1):
            # Not dynamic_update_slice: XLA's CPU compiler (jax 0.10.2) may write such a slice in place while it still
            # reads it. A RoPE written over its own input was 0.8 off, once a reshape dropped a batch of one.
            before = lax.slice_in_dim(parent, 0, places.start, axis=partial[0])
            after = lax.slice_in_dim(parent, places[-1] + 1, None, axis=partial[0])
            return lax.concatenate([before, value, after], partial[0])
        # Of strided writes `.at[].set` would make a scatter.
        holes = [
            (places[0], size - 1 - places[-1], places.step - 1 if len(places) > 1 else 0)
            for places, size in zip(self._ranges, parent.shape, strict=True)
        ]
        return jnp.where(self._written_mask(parent.shape), lax.pad(value, jnp.zeros((), value.dtype), holes), parent)

    def _written_mask(self, shape: Shape) -> jax.Array:
        mask = jnp.ones((), bool)
        for dim, (places, size) in enumerate(zip(self._ranges, shape, strict=True)):
            if len(places) != size:
                at = lax.broadcasted_iota(jnp.int32, (size,) + (1,) * (len(shape) - dim - 1), 0)
                within = (at >= places.start) & (at <= places[-1])
                mask = mask & within & ((at - places.start) % places.step == 0)
        return mask

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        strides = layout_strides(parent, shape)
        if strides is None:
            return None
        result, dim = [], 0
        for part in self._parts:
            if part is None:
                result.append(1)
                continue
            if isinstance(part, slice):
                result.append(strides[dim] * self._ranges[dim].step)
            dim += 1
        return tuple(result)


@dataclasses.dataclass(frozen=True)
class DynamicIndex:
    """`parent[key]` with integers that are known only when the program runs."""

    key: tuple[Any, ...]

    def read(self, parent: jax.Array) -> jax.Array:
        return parent[self.key]

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        return parent.at[self.key].set(value)

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        return None


@dataclasses.dataclass(frozen=True)
class Selection:
    """Any other selection of elements (a diagonal, windows): `read` of an array of positions gives where to write."""

    read: Callable[[jax.Array], jax.Array]

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        if value.size > parent.size:
            raise TraceError(
                f"a view of shape {value.shape} of {parent.size} elements was written to: several of its elements are "
                f"one in memory; write into .clone() of it{see('shared-memory')}"
            )
        places = self.read(jnp.arange(parent.size, dtype=jnp.int32).reshape(parent.shape))
        return parent.reshape(-1).at[places.reshape(-1)].set(value.reshape(-1)).reshape(parent.shape)

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        return None


@dataclasses.dataclass(frozen=True)
class Reinterpretation:
    """The same elements in another dtype, complex numbers as pairs for instance; `inverse` converts back."""

    read: Callable[[jax.Array], jax.Array]
    inverse: Callable[[jax.Array], jax.Array]

    def write(self, parent: jax.Array, value: jax.Array) -> jax.Array:
        return self.inverse(value)

    def layout(self, parent: Layout, shape: Shape) -> Layout:
        return None


def writable_recipes(recipes: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
    """Recipes equal to these that can also write to a part of an expanded tensor that has each element once."""
    place = next((place for place, recipe in enumerate(recipes[:-1]) if isinstance(recipe, Expand)), None)
    if place is None:
        return recipes
    rest = recipes[place:]
    return (*recipes[:place], Selection(lambda array: functools.reduce(lambda a, recipe: recipe.read(a), rest, array)))
