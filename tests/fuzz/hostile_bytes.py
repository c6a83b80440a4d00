"""Strategies for damaged and hostile files: bytes, JSON documents and safetensors, most of them close to a good one."""

from __future__ import annotations

import copy
import functools
import json
import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "nan",
        "1e999",
        "None",
        "null",
        "true",
        "demo",
        "a" * 300,
        "\x00",
        "\x1b[31m\r\x07",
        "\u202e",
    ),
    *("../../etc/passwd", "/etc/passwd", "..", ".", "~", "a/b", "a\\b", "%s%n", "{0}", "${HOME}", "$(id)", "é红🔴"),
    *("\ud800", "UNETLoader", "__class__", "__proto__", "F32", "auto", "http://127.0.0.1:1/", "(a+)+$", "[", "a\nb"),
)
GOOD_TEXTS = (
    "auto",
    "cpu",
    "float32",
    "fp8",
    "demo",
    "480P",
    "dp=2",
    "video",
    "full",
    "4x16x16:3x3x3",
    "2048,2048,1024",
)
_DEEP = ("[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70, "[" * 100_000)

small_texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(FLOATS), small_texts, st.integers(), st.floats()
)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(small_texts, inner, max_size=4)),
    max_leaves=6,
)


def dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


# Made once: a strategy that is made for each case is checked for each case, a third of the time.
_CHANGES = st.integers(1, 3)
_CHANGE_KINDS = st.sampled_from(("replace", "replace", "replace", "delete", "add", "wrap", "repeat"))
_GO_DEEPER = st.integers(0, 3)
_BOOLEANS = st.booleans()
_REPEATS = st.sampled_from((0, 2, 50))
_places = functools.cache(lambda count: st.sampled_from(range(count)))
"""One of so many places."""


@st.composite
def changed_value(draw: st.DrawFn, seed: Any) -> Any:
    """A JSON value with one to three changes somewhere in it."""
    value = copy.deepcopy(seed)
    for _ in range(draw(_CHANGES)):
        parent, place, here = None, None, value
        while isinstance(here, dict | list) and here and (parent is None or draw(_GO_DEEPER)):
            places = list(here) if isinstance(here, dict) else list(range(len(here)))
            parent, place = here, places[draw(_places(len(places)))]
            here = parent[place]
        kind = draw(_CHANGE_KINDS)
        if parent is None:
            value = draw(values) if kind == "replace" else value
        elif kind == "delete":
            del parent[place]
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(small_texts)] = draw(values)
        elif kind == "wrap":
            parent[place] = [here] if draw(_BOOLEANS) else {"x": here}
        elif kind == "repeat" and isinstance(here, list):
            parent[place] = here * draw(_REPEATS)
        else:
            parent[place] = draw(values)
    return value


def documents(*seeds: Any) -> st.SearchStrategy[bytes]:
    """JSON files: good ones changed, any other value, damaged text, nesting without end."""
    changed = st.one_of([changed_value(seed) for seed in seeds]).map(dump)
    damaged = st.one_of([changed_bytes(dump(seed)) for seed in seeds])
    return st.one_of(changed, changed, changed, damaged, values.map(dump), st.sampled_from(_DEEP).map(str.encode))


_DAMAGES = st.integers(1, 4)
_DAMAGE_KINDS = st.sampled_from(("cut", "overwrite", "overwrite", "insert", "remove", "repeat", "number", "flip"))
_FORMS = st.sampled_from(("<I", ">I", "<Q", ">H", "<H", "B"))
_HEADERS = _places(4)
_EXTREMES = _places(6)
_COPIES = st.sampled_from((1, 2, 20))
_FEW, _SOME = st.binary(min_size=1, max_size=8), st.binary(min_size=1, max_size=16)


@st.composite
def changed_bytes(draw: st.DrawFn, seed: bytes) -> bytes:
    """A file with one to four changes: cut off, overwritten, lengthened, doubled, with other numbers in its header."""
    content = bytearray(seed)
    for _ in range(draw(_DAMAGES)):
        at = draw(st.integers(0, len(content)))
        # Headers are at the beginning, and a random place of a file is among its pixels.
        at = min(at, (32, 128, 512, len(content))[draw(_HEADERS)])
        kind = draw(_DAMAGE_KINDS)
        if kind == "cut":
            del content[at:]
        elif kind == "overwrite":
            piece = draw(_FEW)
            content[at : at + len(piece)] = piece
        elif kind == "insert":
            content[at:at] = draw(_SOME)
        elif kind == "remove":
            del content[at : at + draw(st.integers(1, 16))]
        elif kind == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 64))] * draw(_COPIES)
        elif kind == "number":
            form = draw(_FORMS)
            most = 2 ** (8 * struct.calcsize(form)) - 1
            piece = struct.pack(form, (0, 1, most, most // 2, most - 1, most // 2 + 1)[draw(_EXTREMES)])
            content[at : at + len(piece)] = piece
        elif content:
            content[at % len(content)] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


def files(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """Damaged copies of good files, and a few that were never good."""
    changed = [st.one_of([changed_bytes(seed) for seed in seeds])] * 6
    return st.integers(0, 7).flatmap([*changed, st.binary(max_size=64), st.sampled_from((b"", *seeds))].__getitem__)


_DTYPES = ("F32", "F16", "BF16", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "Q9", "", "f32")
_BYTES = {"F64": 8, "I64": 8, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


_ENTRIES, _SIXTH = st.integers(0, 4), st.integers(0, 5)
_DTYPE = st.sampled_from(_DTYPES[:1] * 12 + _DTYPES)
_FILLINGS = st.sampled_from((b"\0\0\0\0", b"\0\0\x80?", b"\0\0\xc0\x7f", b"\xff\xff\xff\xff"))
_WRONG = st.sampled_from((None, None, None, "entry", "length", "bytes", "twice", "deep"))
_NESTINGS = st.sampled_from(_DEEP)
_names = functools.cache(lambda names: st.one_of(st.sampled_from(names), st.sampled_from(names), small_texts))


@st.composite
def safetensors(
    draw: st.DrawFn,
    names: Sequence[str],
    metadata: st.SearchStrategy[dict[str, str]] | None = None,
    shapes: Sequence[tuple[int, ...]] = ((), (1,), (2, 2), (1, 4), (4, 1), (1, 2, 4), (0, 3), (1, 3, 2, 2, 2)),
) -> bytes:
    """Files of a well-formed kind with wrong contents, and of a damaged kind: overlapping and distant offsets, another
    length of the header, tensors of the same name, nested JSON."""
    entries: list[tuple[str, Any]] = []
    data = bytearray()
    if metadata is not None or draw(_SIXTH) == 0:
        entries.append(("__metadata__", draw(metadata if metadata is not None else values)))
    for _ in range(draw(_ENTRIES)):
        name = draw(_names(tuple(names)))
        dtype, shape = draw(_DTYPE), shapes[draw(_places(len(shapes)))]
        size = _BYTES.get(dtype, 4)
        for side in shape:
            size *= side
        filling = draw(_FILLINGS)
        entries.append((name, {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + size]}))
        data += (filling * (size // 4 + 1))[:size]
    damage = draw(_WRONG)
    if damage == "entry" and entries:
        at = draw(st.integers(0, len(entries) - 1))
        entries[at] = (entries[at][0], draw(changed_value(entries[at][1])))
    if damage == "twice":
        entries += entries[-1:]
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries) + "}"
    if damage == "deep":
        text = text[:-1] + f'{"," if entries else ""} "x": {draw(_NESTINGS)}' + "}"
    header = text.encode("utf-8", "surrogatepass")
    header += b" " * (-len(header) % 8)
    length = len(header)
    if damage == "length":
        length = draw(st.sampled_from((0, 1, length - 1, length + 1, 2**20, 2**32, 2**63 - 1, 2**64 - 1)))
    content = struct.pack("<Q", length) + header + bytes(data)
    return draw(changed_bytes(content)) if damage == "bytes" else content
