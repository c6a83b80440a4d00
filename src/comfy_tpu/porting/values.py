"""What reading can know of a value without running anything: whether it is a tensor, where it is, and a little more."""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Sequence

from comfy_tpu.porting.source import Definition


class Place(enum.IntEnum):
    UNKNOWN = 0
    """No tensor, or nothing is known. Nothing is said about these."""
    HOST = 1
    """A tensor made without a device: its values are known while tracing."""
    TRACED = 2
    """A tensor of the program: its values are not."""


@dataclasses.dataclass(frozen=True)
class Value:
    place: Place = Place.UNKNOWN
    is_mask: bool = False
    items: Value | None = None
    """Of a tuple or a list: what its items are, all taken together."""
    parts: tuple[Value, ...] | None = None
    """The items one by one, where they are written down."""
    named: tuple[tuple[str, Value], ...] | None = None
    """Of a dict: the values of its keys, where these are written down."""
    instance: Definition | None = None
    """The class that this is an object of."""
    function: Definition | None = None
    """A function that is defined where it is used."""
    truth: bool | None = None
    """Where it is known at inference on a TPU: `self.training`, `torch.cuda.is_available()`."""
    is_none: bool = False
    is_float64: bool = False
    """A dtype."""
    is_complex: bool = False
    """A dtype, or a number that is written down."""
    is_strided: bool = False
    """A view of every second element, or third."""
    is_random: bool = False
    """A generator of Python's or numpy's."""
    made_at: int = 0
    """The line that made a host tensor."""

    @property
    def is_traced(self) -> bool:
        return self.place is Place.TRACED

    @property
    def is_tensor(self) -> bool:
        return self.place is not Place.UNKNOWN

    def holds_traced(self) -> bool:
        return self.is_traced or (self.items is not None and self.items.holds_traced())

    @property
    def each(self) -> Value:
        """What a loop over it gives: the items of a list, the rows of a tensor."""
        if self.items is not None:
            return self.items
        return Value(self.place, is_mask=self.is_mask) if self.is_tensor else UNKNOWN

    def entry(self, key: ast.expr) -> Value:
        """Of a dict."""
        text = _text(key)
        return UNKNOWN if text is None else dict(self.named or ()).get(text, UNKNOWN)

    def with_entry(self, key: ast.expr, value: Value) -> Value:
        """The dict after a write; whatever it holds, once the key is not known."""
        text = _text(key)
        return UNKNOWN if text is None else Value(named=tuple({**dict(self.named or ()), text: value}.items()))


def _text(key: ast.expr) -> str | None:
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


UNKNOWN = Value()
NONE = Value(truth=False, is_none=True)
TRACED = Value(Place.TRACED)
SEVERAL_TRACED = Value(items=TRACED)


def known(truth: bool) -> Value:
    return Value(truth=truth)


def constant(value: object) -> Value:
    """Of something written down in the source."""
    if value is None:
        return NONE
    if isinstance(value, complex):
        return Value(is_complex=True)
    return known(value) if isinstance(value, bool) else UNKNOWN


def joined(one: Value, other: Value) -> Value:
    """Of a value that is one or the other."""
    if one == other:
        return one
    higher = one if one.place >= other.place else other
    items = one.items or other.items
    if one.items is not None and other.items is not None:
        items = joined(one.items, other.items)
    parts = None
    if one.parts is not None and other.parts is not None and len(one.parts) == len(other.parts):
        parts = tuple(joined(*pair) for pair in zip(one.parts, other.parts, strict=True))
    named = None
    if one.named is not None and other.named is not None and dict(one.named).keys() == dict(other.named).keys():
        named = tuple((key, joined(value, dict(other.named)[key])) for key, value in one.named)
    return dataclasses.replace(
        higher,
        is_mask=one.is_mask and other.is_mask,
        items=items,
        parts=parts,
        named=named,
        instance=one.instance or other.instance,
        truth=None,
        is_none=one.is_none and other.is_none,
        is_float64=one.is_float64 or other.is_float64,
        is_complex=one.is_complex or other.is_complex,
        is_strided=one.is_strided or other.is_strided,
    )


def several(parts: Sequence[Value]) -> Value:
    """A tuple of these."""
    whole = parts[0] if parts else UNKNOWN
    for part in parts[1:]:
        whole = joined(whole, part)
    return Value(items=whole, parts=tuple(parts))


def computed(*operands: Value) -> Value:
    """Of an operation on these."""
    place = max((operand.place for operand in operands), default=Place.UNKNOWN)
    return Value(place) if place is not Place.UNKNOWN else UNKNOWN
