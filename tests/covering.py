"""Rows of a product that cover it: every pair of values in at least one row that runs by default, the rest is slow.

Most faults need one value or two to meet (a mesh and a length that it does not divide), so a covering set finds them at
a fraction of the product's time. `make test-all` runs the whole product.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(
    names: str, *factors: Iterable[Any], strength: int = 2, always: Iterable[tuple[Any, ...]] = ()
) -> pytest.MarkDecorator:
    """The product of `factors` as parameters, with all but a covering set marked slow.

    `strength`: how many factors' values are combined in every way; 1 where each value by itself is the subject, 0 where
    nothing but `always` runs by default.
    `always`: cases that are in the set whatever else is.
    """
    lists = [list(factor) for factor in factors]
    rows = list(itertools.product(*(range(len(values)) for values in lists)))
    fixed = [tuple(values.index(value) for values, value in zip(lists, case, strict=True)) for case in always]
    chosen = set(covering_rows(rows, strength, fixed))
    cases = [[values[index] for values, index in zip(lists, row, strict=True)] for row in rows]
    slow = [[] if row in chosen else [pytest.mark.slow] for row in rows]
    return pytest.mark.parametrize(
        [name.strip() for name in names.split(",")],
        [pytest.param(*case, marks=marks) for case, marks in zip(cases, slow, strict=True)],
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


def mark_thorough_cases(items: Iterable[pytest.Item], *, whole: bool) -> None:
    """Of a test with `default_cases`, marks the cases with other ids thorough.

    `whole`: `items` has all cases, so an id that none of them has is an error.
    """
    missing: dict[str, set[str]] = {}
    for item in items:
        if (named := item.get_closest_marker("default_cases")) is not None:
            case = item.callspec.id  # type: ignore[attr-defined]
            missing.setdefault(item.nodeid.split("[")[0], set(named.args)).discard(case)
            if case not in named.args:
                item.add_marker(pytest.mark.thorough)
    if whole and (unknown := {test: ids for test, ids in missing.items() if ids}):
        raise pytest.UsageError(f"default_cases names cases that are not there: {unknown}")
