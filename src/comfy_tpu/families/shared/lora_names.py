"""Converts diffusers' names of modules to those of a model's own code, for LoRA files with such names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from comfy_tpu.families.model_family import Rows

ALL: Rows = (slice(None),)

Names = Iterable[tuple[str, str]]
"""(regular expression, replacement) pairs, applied in order."""


def rename_module(module: str, names: Names) -> str:
    for pattern, name in names:
        module = re.sub(pattern, name, module)
    return module


def fused_qkv_rows(module: str, shape: tuple[int, ...]) -> Rows | None:
    """The rows of query, key or value in a module that fuses the three; None for another module."""
    match = re.search(r"\b(?:to_([qkv])|add_([qkv])_proj)$", module)
    if match is None:
        return None
    start = "qkv".index(match[1] or match[2]) * shape[0]
    return (slice(start, start + shape[0]),)


def swap_halves(shape: tuple[int, ...]) -> Rows:
    """The rows of the last norm, whose shift and scale are in the opposite order in diffusers."""
    half = shape[0] // 2
    return (slice(half, 2 * half), slice(0, half))
