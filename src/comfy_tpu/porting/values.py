"""What the static reader knows of a value: whether it is a tensor, where that is, and what a container holds."""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Sequence

from comfy_tpu.porting.source import Definition


class Place(enum.IntEnum):
    UNKNOWN = 0
    """No tensor, or nothing is known: never reported."""
    HOST = 1
    """A tensor made without a device; its values are known while tracing."""
    TRACED = 2
    """A tensor of the program; its values are not known."""


@dataclasses.dataclass(frozen=True)
class Value:
    place: Place = Place.UNKNOWN
    is_mask: bool = False
    item: Value | None = None
    """The join of all items of a tuple or list."""
    elements: tuple[Value, ...] | None = None
    """The items one by one, where the source lists them."""
    entries: tuple[tuple[str, Value], ...] | None = None
    """The values of a dict by key, where the source lists them."""
    instance: Definition | None = None
    """The class of an object."""
    function: Definition | None = None
    """A function defined inside another one."""
    truth: bool | None = None
    """The truth of a condition, where inference on a TPU decides it: `self.training` is false."""
    is_none: bool = False
    is_float64: bool = False
    """Set for a dtype."""
    is_complex: bool = False
    """Set for a dtype or a literal number."""
    is_strided: bool = False
    """Set for a view of every second or third element."""
    is_random_generator: bool = False
    """Set for a generator of Python or numpy."""
    origin_line: int = 0
    """The line that made a host tensor."""

    @property
    def is_traced(self) -> bool:
        return self.place is Place.TRACED

    @property
    def is_host(self) -> bool:
        return self.place is Place.HOST

    @property
    def is_tensor(self) -> bool:
        return self.place is not Place.UNKNOWN

    @property
    def contains_traced(self) -> bool:
        return self.is_traced or (self.item is not None and self.item.contains_traced)

    @property
    def loop_variable(self) -> Value:
        """The loop variable of a loop over this value: an item of a list, a row of a tensor."""
        if self.item is not None:
            return self.item
        return Value(self.place, is_mask=self.is_mask) if self.is_tensor else UNKNOWN

    def entry(self, key: ast.expr) -> Value:
        """The value of a dict at a literal key."""
        return dict(self.entries or ()).get(literal_text(key) or "", UNKNOWN)

    def with_entry(self, key: ast.expr, value: Value) -> Value:
        """The dict after a write; unknown after a write at a computed key."""
        text = literal_text(key)
        return UNKNOWN if text is None else Value(entries=tuple({**dict(self.entries or ()), text: value}.items()))


UNKNOWN = Value()
NONE = Value(truth=False, is_none=True)
TRACED = Value(Place.TRACED)
TRACED_SEQUENCE = Value(item=TRACED)


def literal_text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def known_truth(truth: bool) -> Value:
    return Value(truth=truth)


def literal_value(literal: object) -> Value:
    if literal is None:
        return NONE
    if isinstance(literal, complex):
        return Value(is_complex=True)
    return known_truth(literal) if isinstance(literal, bool) else UNKNOWN


def join(one: Value, other: Value) -> Value:
    """The value of an expression that is one or the other."""
    if one == other:
        return one
    item = one.item or other.item
    if one.item is not None and other.item is not None:
        item = join(one.item, other.item)
    elements = None
    if one.elements is not None and other.elements is not None and len(one.elements) == len(other.elements):
        elements = tuple(map(join, one.elements, other.elements))
    entries = None
    if one.entries is not None and other.entries is not None:
        others = dict(other.entries)
        if dict(one.entries).keys() == others.keys():
            entries = tuple((key, join(value, others[key])) for key, value in one.entries)
    return dataclasses.replace(
        one if one.place >= other.place else other,
        is_mask=one.is_mask and other.is_mask,
        item=item,
        elements=elements,
        entries=entries,
        instance=one.instance or other.instance,
        truth=None,
        is_none=one.is_none and other.is_none,
        is_float64=one.is_float64 or other.is_float64,
        is_complex=one.is_complex or other.is_complex,
        is_strided=one.is_strided or other.is_strided,
    )


def sequence(elements: Sequence[Value]) -> Value:
    """A tuple or list of these."""
    item = elements[0] if elements else UNKNOWN
    for element in elements[1:]:
        item = join(item, element)
    return Value(item=item, elements=tuple(elements))


def combine(*operands: Value) -> Value:
    """The result of an operation on these: a tensor if one of them is."""
    return Value(max((operand.place for operand in operands), default=Place.UNKNOWN))
