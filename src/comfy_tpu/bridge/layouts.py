"""Strides that torch would give a tensor: they decide whether `reshape` and `contiguous` share memory or copy.

jax arrays have no strides, so a traced tensor keeps them beside its array: `ROW_MAJOR`, a tuple, or None for unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Layout: TypeAlias = Shape | Literal["row-major"] | None

ROW_MAJOR: Final = "row-major"


def layout_strides(layout: Layout, shape: Shape) -> Shape | None:
    if layout != ROW_MAJOR:
        return layout
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def is_row_major(layout: Layout, shape: Shape) -> bool | None:
    """Whether a layout is row-major; None where that is unknown. Strides of dimensions of size 1 do not matter."""
    if layout == ROW_MAJOR or math.prod(shape) == 0:
        return True
    if layout is None:
        return None
    expected = 1
    for size, stride in zip(reversed(shape), reversed(layout), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def copy_layout(layout: Layout, shape: Shape) -> Layout:
    """The layout of a copy made by `clone`, `to` or arithmetic: the same order of dimensions in memory, no gaps."""
    if layout is None or layout == ROW_MAJOR:
        return layout
    strides = [stride for stride, size in zip(layout, shape, strict=True) if size != 1]
    if 0 in strides or len(set(strides)) < len(strides):
        return None
    result, expected = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=layout.__getitem__):
        if shape[dim] != 1:
            result[dim] = expected
            expected *= shape[dim]
    return tuple(result)


def view_layout(layout: Layout, shape: Shape, new_shape: Shape) -> tuple[bool | None, Layout]:
    """Whether a tensor can be viewed in another shape without a copy (None: unknown), and the strides of that view."""
    if layout == ROW_MAJOR:
        return True, ROW_MAJOR
    if layout is not None:
        found = _view_strides(shape, layout, new_shape)
        return found is not None, found
    # With gaps between its rows, dimensions can be split and never merged: what that allows is always possible.
    with_gaps = layout_strides(ROW_MAJOR, tuple(size + 1 for size in shape))
    assert with_gaps is not None
    return True if _view_strides(shape, with_gaps, new_shape) is not None else None, None


def _view_strides(shape: Shape, strides: Shape, new_shape: Sequence[int]) -> Shape | None:
    """`at::detail::computeStride` of torch."""
    if not shape or math.prod(shape) == 0:
        return strides if tuple(new_shape) == shape else layout_strides(ROW_MAJOR, tuple(new_shape))
    result = [0] * len(new_shape)
    place = len(new_shape) - 1
    stride, elements, placed = strides[-1], 1, 1
    for dim in reversed(range(len(shape))):
        elements *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != elements * stride):
            while place >= 0 and (placed < elements or new_shape[place] == 1):
                result[place] = placed * stride
                placed *= new_shape[place]
                place -= 1
            if placed != elements:
                return None
            if dim > 0:
                stride, elements, placed = strides[dim - 1], 1, 1
    return tuple(result) if place == -1 else None
