"""What a model's own code calls the modules of diffusers, for LoRA files that have its names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from comfy_tpu.families.model_family import Rows

ALL: Rows = (slice(None),)

Names = Iterable[tuple[str, str]]
"""(regular expression, replacement), one after the other."""


def renamed(module: str, names: Names) -> str:
    for pattern, name in names:
        module = re.sub(pattern, name, module)
    return module


def rows_of_fused(module: str, shape: tuple[int, ...]) -> Rows | None:
    """Where query, key and value are one module of theirs, in this order. None: the module is none of the three."""
    match = re.search(r"\b(?:to_([qkv])|add_([qkv])_proj)$", module)
    if match is None:
        return None
    start = "qkv".index(match[1] or match[2]) * shape[0]
    return (slice(start, start + shape[0]),)


def swapped_halves(shape: tuple[int, ...]) -> Rows:
    """Of the last norm: theirs shifts and scales, diffusers' scales and shifts."""
    half = shape[0] // 2
    return (slice(half, 2 * half), slice(0, half))
