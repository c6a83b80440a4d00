"""Finds the cause of each collective in a program. One that no line of the table matches is an unwanted resharding."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Literal

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.traffic import UNEXPLAINED, Cause, Kind, Traffic, sent_bytes
from comfy_tpu.planning.hlo import Collective, describe

WeightShapes = Collection[tuple[int, ...]]
"""The shape of one device's share of each weight while it computes; of one layer for stacked weights."""

_Only = Literal["any", "weights", "refined text"]
"""The arrays that a line is about. Refined text: features of fewer tokens than the blocks read, of one encoder."""


@dataclasses.dataclass(frozen=True)
class _Line:
    cause: Cause
    kinds: tuple[Kind, ...]
    axes: frozenset[str]
    """The mesh axes that the collective may use."""
    in_loop: bool
    operation: str
    """A regular expression for the instruction's name in the traced program."""
    only: _Only = "any"


def _line(
    cause: Cause,
    kinds: tuple[Kind, ...],
    axes: str,
    in_loop: bool,
    operation: str,
    *,
    only: _Only = "any",
) -> _Line:
    return _Line(cause, kinds, frozenset(axes.split()), in_loop, operation, only)


_TABLE = (
    _line("sequence exchange (Ulysses)", ("all-to-all",), "sp", True, r"all_to_all$"),
    _line("keys and values around the ring", ("collective-permute",), "sp", True, r"ppermute$"),
    _line("sum over columns (tp)", ("all-reduce",), "tp", True, r"linear/.*dot_general"),
    _line("norm over columns (tp)", ("all-reduce",), "tp", True, r"rms_norm/"),
    _line("weight gather", ("all-gather",), "sp tp", True, r"", only="weights"),
    _line("weight gather", ("all-gather",), "sp tp", False, r"", only="weights"),
    # HunyuanVideo's text is refined in shares of heads or of tokens, once a step.
    _line("text gather", ("all-gather",), "tp", True, r"(linear/dot_general|view/reshape)$", only="refined text"),
    # Put together before its order is applied. XLA of jax 0.12 names the gather by the loop over the refiner's blocks.
    _line("text gather", ("all-gather",), "sp", False, r"_step\)/(sharding_constraint|while)$", only="refined text"),
    # One row a sample, computed in pieces.
    _line("modulation gather", ("all-gather",), "tp", True, r"linear/"),
    _line("modulation gather", ("all-gather",), "tp", False, r"_step\)/sharding_constraint$"),  # one for all blocks
    # The compiler for v7x embeds patches split by features, and hands each device its tokens afterwards.
    _line("patch embedding", ("all-to-all",), "sp", False, r"(_step\)/reshape|conv3d/[\w/]*)$"),
    # Behind the last block: the answer is put together, guided and added to the samples, which every device holds.
    _line(
        "prediction gather",
        ("all-gather",),
        "sp",
        False,
        r"(view/reshape|convert_element_type|add\.Tensor/add|linear/(add|dot_general)|prediction/sharding_constraint)$",
    ),
    _line(
        "guidance branches",
        ("all-to-all", "collective-permute", "all-gather"),
        "dp",
        False,
        r"(cat/concatenate|^convert\.\d+)$",
    ),
    _line(
        "guidance branches",
        ("collective-permute", "all-reduce", "all-gather"),
        "dp",
        False,
        # XLA of jax 0.12 moves the exchange behind the conversion to float32.
        r"((add|sub)\.Tensor/|chunk/slice|_step\)/convert_element_type$)",
    ),
)


def explain_traffic(
    collectives: list[Collective], sizes: MeshSizes, weights: WeightShapes, text_tokens: int
) -> tuple[Traffic, ...]:
    """Traffic by cause, kind and axes, the largest first. Collectives without a cause are listed one by one.

    `text_tokens`: those that the blocks read.
    """
    merged: dict[tuple[str, ...], Traffic] = {}
    for item in collectives:
        axes = item.axes(sizes)
        cause = _cause(item, axes, weights, text_tokens)
        detail = f"{describe(item.shape, item.dtype)} {item.operation}" if cause == UNEXPLAINED else ""
        nbytes = item.times * sent_bytes(item.kind, len(item.group), item.nbytes)
        key = (cause, item.kind, *axes, detail)
        known = merged.get(key)
        merged[key] = Traffic(
            cause=cause,
            kind=item.kind,
            axes=axes,
            group=len(item.group),
            count=item.times + (known.count if known else 0),
            nbytes=nbytes + (known.nbytes if known else 0),
            detail=detail,
        )
    return tuple(sorted(merged.values(), key=lambda traffic: -traffic.nbytes))


def _cause(item: Collective, axes: tuple[str, ...], weights: WeightShapes, text_tokens: int) -> str:
    for line in _TABLE:
        if (
            item.kind in line.kinds
            and set(axes) <= line.axes
            and item.in_loop == line.in_loop
            and re.search(line.operation, item.operation)
            and (line.only != "weights" or _is_weight(item, weights))
            and (line.only != "refined text" or _is_refined_text(item, text_tokens))
        ):
            return line.cause
    return UNEXPLAINED


def _is_weight(item: Collective, weights: WeightShapes) -> bool:
    if _squeeze(item.shape) in {_squeeze(shape) for shape in weights}:
        return True
    # The TPU compiler may fold a weight before the gather that we asked for: [5120, 64] as [32, 160, 64].
    return item.operation.endswith("sharding_constraint") and math.prod(item.shape) in map(math.prod, weights)


def _is_refined_text(item: Collective, text_tokens: int) -> bool:
    """HunyuanVideo refines 1,000 tokens; its blocks read those of glyphs and images, too."""
    return len(item.shape) == 3 and 1 < item.shape[1] < text_tokens


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without dimensions of size 1: a layer that is cut from its stack keeps a leading one."""
    return tuple(size for size in shape if size != 1)
