"""Rows of a product that cover it: every pair of values in at least one row that runs by default, the rest is slow.

Most faults need one value or two to meet (a mesh and a length that it does not divide), so a covering set finds them at
a fraction of the product's time. `make test-all` runs the whole product.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(
    names: str,
    *factors: Iterable[Any],
    strength: int = 2,
    always: Iterable[tuple[Any, ...]] = (),
    thorough: Iterable[tuple[Any, ...]] = (),
) -> pytest.MarkDecorator:
    """The product of `factors` as parameters, with all but a covering set marked slow.

    `strength`: how many factors' values are combined in every way; 1 where each value by itself is the subject, 0 where
    nothing but `always` runs by default.
    `always`: cases that are in the set whatever else is.
    `thorough`: cases that are marked thorough instead, in the set or not.
    """
    lists = [list(factor) for factor in factors]
    rows = list(itertools.product(*(range(len(values)) for values in lists)))

    def find_rows(cases: Iterable[tuple[Any, ...]]) -> list[tuple[int, ...]]:
        return [tuple(values.index(value) for values, value in zip(lists, case, strict=True)) for case in cases]

    marks: dict[tuple[int, ...], list[pytest.MarkDecorator]] = dict.fromkeys(rows, [pytest.mark.slow])
    marks |= dict.fromkeys(covering_rows(rows, strength, find_rows(always)), [])
    marks |= dict.fromkeys(find_rows(thorough), [pytest.mark.thorough])
    cases = [[values[index] for values, index in zip(lists, row, strict=True)] for row in rows]
    return pytest.mark.parametrize(
        [name.strip() for name in names.split(",")],
        [pytest.param(*case, marks=marks[row]) for case, row in zip(cases, rows, strict=True)],
    )


def covering_rows(
    rows: Sequence[tuple[int, ...]], strength: int, fixed: Sequence[tuple[int, ...]] = ()
) -> list[tuple[int, ...]]:
    """The `fixed` ones and the fewest more that a greedy choice finds; the same ones every time."""
    strength = min(strength, len(rows[0]))
    parts = {row: set(itertools.combinations(enumerate(row), strength)) for row in rows}
    missing = set().union(*parts.values()).difference(*(parts[row] for row in fixed))
    chosen = list(fixed)
    while missing:
        best = max(rows, key=lambda row: len(parts[row] & missing))
        chosen.append(best)
        missing -= parts[best]
    return chosen
