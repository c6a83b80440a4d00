"""Which operators return views, of what kind, and the strides of other operators' results where they are known.

An operator's schema declares its aliases: `Tensor(a)` is returned as a view, `Tensor(a!)` is written.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from comfy_tpu.bridge.layouts import ROW_MAJOR, Layout, Shape, copy_layout
from comfy_tpu.bridge.recipes import Expand, Index, Permute, Recipe, Reinterpretation

aten = torch.ops.aten
F = torch.nn.functional


class Kind(enum.Enum):
    PLAIN = enum.auto()
    SAME_ORDER = enum.auto()
    """A view of the same elements in the same order, or a copy if strides do not allow it."""
    CONVERTS = enum.auto()
    """`to`, which returns the tensor itself if there is nothing to convert."""
    VIEW = enum.auto()
    CHANGES_SHAPE = enum.auto()
    """An operator that changes the shape of its operand in place: `unsqueeze_`."""
    WRITES = enum.auto()
    WRITES_OUT = enum.auto()


_SAME_ORDER = {
    aten._reshape_alias,
    aten.alias,
    aten.detach,
    aten.flatten,
    aten.lift_fresh,
    aten.reshape,
    aten.squeeze,
    aten.unsqueeze,
    aten.view,
}


@functools.cache
def custom_definition(func: Any) -> Callable[..., Any] | None:
    """The Python function behind an operator that was made by `torch.library.custom_op`."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    packet: Any = getattr(func, "overloadpacket", func)
    found = torch._library.custom_ops.OPDEFS.get(packet._qualified_op_name)
    return None if found is None else found._init_fn


@functools.cache
def operator_kind(func: Any) -> Kind:
    if isinstance(func, torch._ops.OpOverload):
        packet, schemas = func.overloadpacket, [func._schema]
    elif isinstance(func, torch._ops.OpOverloadPacket):
        packet, schemas = func, [getattr(func, "default", getattr(func, func.overloads()[0]))._schema]
    else:
        return Kind.PLAIN
    written = [a for s in schemas for a in s.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        if isinstance(func, torch._ops.OpOverload) and torch.Tag.inplace_view in func.tags:
            return Kind.CHANGES_SHAPE
        return Kind.WRITES_OUT if written[0].kwarg_only else Kind.WRITES
    if packet is aten.to:
        return Kind.CONVERTS
    if packet in _SAME_ORDER and not str(func).endswith(".dtype"):
        return Kind.SAME_ORDER
    returned = any(r.alias_info is not None for s in schemas for r in s.returns)
    return Kind.VIEW if returned else Kind.PLAIN


def find_recipes(func: Any, shape: Shape, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """A recipe for each view that `func(parent, *args, **kwargs)` returns, for a parent of `shape`; None for an
    operator that is not in RECIPES."""
    make = RECIPES.get(getattr(func, "overloadpacket", func))
    return None if make is None else make(shape, *args, **kwargs)


def returns_sequence(func: Any) -> bool:
    schema = getattr(func, "_schema", None) or getattr(func, func.overloads()[0])._schema
    return len(schema.returns) > 1 or isinstance(schema.returns[0].type, torch.ListType)


def _index_dim(shape: Shape, dim: int, part: int | slice) -> Index:
    return Index((slice(None),) * (dim % len(shape)) + (part,), shape)


def _permute(shape: Shape, dims: Sequence[int]) -> list[Recipe]:
    return [Permute(tuple(dim % len(shape) for dim in dims))]


def _transpose(shape: Shape, dim0: int = 0, dim1: int = 1) -> list[Recipe]:
    order = list(range(len(shape)))
    if len(shape) > 1:  # `t` of a vector is itself
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return [Permute(tuple(order))]


def _select(shape: Shape, dim: int, index: int) -> list[Recipe]:
    return [_index_dim(shape, dim, index)]


def _slice(shape: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> list[Recipe]:
    return [_index_dim(shape, dim, slice(start, end, step))]


def _narrow(shape: Shape, dim: int, start: int, length: int) -> list[Recipe]:
    start = start % shape[dim] if start < 0 else start
    return [_index_dim(shape, dim, slice(start, start + length))]


def _split(shape: Shape, split_size: int | Sequence[int], dim: int = 0) -> list[Recipe]:
    if not isinstance(split_size, int):
        return _split_with_sizes(shape, split_size, dim)
    starts = range(0, max(shape[dim], 1), max(split_size, 1))
    return [_index_dim(shape, dim, slice(start, start + split_size)) for start in starts]


def _split_with_sizes(shape: Shape, split_sizes: Sequence[int], dim: int = 0) -> list[Recipe]:
    ends = list(itertools.accumulate(split_sizes))
    return [_index_dim(shape, dim, slice(end - size, end)) for size, end in zip(split_sizes, ends, strict=True)]


def _tensor_split(shape: Shape, indices_or_sections: int | Sequence[int], dim: int = 0) -> list[Recipe]:
    length, parts = shape[dim], indices_or_sections
    if isinstance(parts, int):
        sizes = [length // parts + (part < length % parts) for part in range(parts)]
        return _split_with_sizes(shape, sizes, dim)
    return [_index_dim(shape, dim, slice(*ends)) for ends in itertools.pairwise([0, *parts, length])]


def _unbind(shape: Shape, dim: int = 0) -> list[Recipe]:
    return [_index_dim(shape, dim, index) for index in range(shape[dim])]


def _expand(shape: Shape, size: Sequence[int], *, implicit: bool = False) -> list[Recipe]:
    added = len(size) - len(shape)
    return [Expand(tuple(shape[dim - added] if wanted == -1 else wanted for dim, wanted in enumerate(size)))]


def _as_real(array: Any) -> Any:
    return jnp.stack([array.real, array.imag], -1)


def _as_complex(array: Any) -> Any:
    return lax.complex(array[..., 0], array[..., 1])


RECIPES: dict[Any, Callable[..., list[Any]]] = {
    aten._conj: lambda shape: [Reinterpretation(jnp.conj, jnp.conj)],
    aten.expand: _expand,
    aten.broadcast_to: _expand,
    aten.narrow: _narrow,
    aten.permute: _permute,
    aten.select: _select,
    aten.slice: _slice,
    aten.split: _split,
    aten.split_with_sizes: _split_with_sizes,
    aten.t: _transpose,
    aten.transpose: _transpose,
    aten.tensor_split: _tensor_split,
    aten.unbind: _unbind,
    aten.view_as_complex: lambda shape: [Reinterpretation(_as_complex, _as_real)],
    aten.view_as_real: lambda shape: [Reinterpretation(_as_real, _as_complex)],
}


_ALWAYS_ROW_MAJOR = {
    F.linear,
    aten._unsafe_view,
    aten.addmm,
    aten.bmm,
    aten.embedding,
    aten.mm,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
}
_PRESERVES_ROW_MAJOR = {
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.group_norm,
    F.interpolate,
    F.layer_norm,
    F.pad,
    F.rms_norm,
    aten._softmax,
    aten.amax,
    aten.amin,
    aten.cat,
    aten.clone,
    aten.convolution,
    aten.cumsum,
    aten.empty_like,
    aten.flip,
    aten.full_like,
    aten.gather,
    aten.index_put,
    aten.index_select,
    aten.masked_fill,
    aten.mean,
    aten.native_group_norm,
    aten.native_layer_norm,
    aten.ones_like,
    aten.repeat,
    aten.roll,
    aten.softmax,
    aten.stack,
    aten.sum,
    aten.tril,
    aten.triu,
    aten.zeros_like,
    torch.group_norm,
    torch.layer_norm,
    torch.rms_norm,
}


@functools.cache
def _layout_rule(func: Any) -> tuple[bool, bool, bool]:
    packet = getattr(func, "overloadpacket", func)
    pointwise = isinstance(func, torch._ops.OpOverload) and torch.Tag.pointwise in func.tags
    return packet in _ALWAYS_ROW_MAJOR, packet in _PRESERVES_ROW_MAJOR, pointwise or packet in (aten.clone,)


def result_layout(func: Any, tensors: Sequence[tuple[Layout, Shape]]) -> Layout:
    """The strides of a plain operator's result for operands of these layouts and shapes; None if they are unknown."""
    always, preserves, pointwise = _layout_rule(func)
    if always or not tensors:
        return ROW_MAJOR
    if (preserves or pointwise) and all(layout == ROW_MAJOR for layout, _ in tensors):
        return ROW_MAJOR
    if pointwise and all(tensor == tensors[0] for tensor in tensors):
        return copy_layout(*tensors[0])
    return None
