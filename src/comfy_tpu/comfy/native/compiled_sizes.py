"""Chooses between padding to a size that is compiled and compiling another one.

A padded call wastes a part of its time. The waste is added up for each size, and when it has reached what a program
costs, the program is made. Whatever is called later, that is at most twice as expensive as knowing it in advance.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

Size = tuple[int, ...]


class CompiledSizes:
    """The sizes of one module's programs, what they cost, and what padding to them has wasted."""

    def __init__(self) -> None:
        self._build_seconds: dict[Hashable, dict[Size, float]] = {}
        self._wasted: dict[tuple[Hashable, Size], float] = {}

    def choose(self, signature: Hashable, size: Size, max_work: float = math.inf) -> Size:
        """The size to run a call of this size with. `signature`: what else a program depends on.

        `max_work`: the largest ratio of padded to real work.
        """
        compiled = self._build_seconds.get(signature, {})
        limit = max_work * math.prod(size)
        larger = [each for each in compiled if math.prod(each) <= limit and _covers(each, size)]
        if size in compiled or not larger:
            return size
        chosen = min(larger, key=math.prod)
        return size if self._wasted.get((signature, size), 0.0) >= compiled[chosen] else chosen

    def record(self, signature: Hashable, size: Size, padded: Size, seconds: float, build_seconds: float) -> None:
        """Records a call that ran padded, and its duration; `build_seconds`: the part of it for compilations."""
        self._build_seconds.setdefault(signature, {}).setdefault(padded, build_seconds)
        if padded != size:
            waste = (seconds - build_seconds) * (1 - math.prod(size) / math.prod(padded))
            self._wasted[signature, size] = self._wasted.get((signature, size), 0.0) + waste


def _covers(larger: Size, size: Size) -> bool:
    return all(one >= other for one, other in zip(larger, size, strict=True))
