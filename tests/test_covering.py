"""That what runs by default covers what it is said to cover."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.covering import covering, covering_rows, mark_thorough_cases


@pytest.mark.parametrize(
    ("sizes", "strength", "most"), [((5, 2, 2), 2, 10), ((3, 3, 2), 2, 9), ((5, 2), 1, 5), ((4,), 2, 4)]
)
def test_every_combination_is_in_some_row(sizes: tuple[int, ...], strength: int, most: int) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    chosen = covering_rows(rows, strength)
    assert len(chosen) <= most
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        wanted = set(itertools.product(*(range(sizes[column]) for column in columns)))
        assert {tuple(row[column] for column in columns) for row in chosen} == wanted


def test_the_rest_of_the_product_is_slow() -> None:
    parameters = covering("letter, number", "ab", [1, 2, 3], strength=1).args[1]
    assert [parameter.values for parameter in parameters] == list(itertools.product("ab", [1, 2, 3]))
    default = [parameter.values for parameter in parameters if not parameter.marks]
    assert len(default) == 3
    assert {letter for letter, _ in default} == {"a", "b"}
    assert {number for _, number in default} == {1, 2, 3}


def test_cases_that_are_always_run_count_for_the_others() -> None:
    parameters = covering("letter, number", "ab", [1, 2], strength=1, always=[("a", 2), ("b", 2)]).args[1]
    assert {parameter.values for parameter in parameters if not parameter.marks} == {("a", 2), ("b", 2), ("a", 1)}


def collected(case: str, *default: str) -> Any:
    marks = [pytest.mark.default_cases(*default).mark] if default else []
    return SimpleNamespace(
        nodeid=f"test.py::test[{case}]",
        callspec=SimpleNamespace(id=case),
        get_closest_marker=lambda _: marks[0] if marks else None,
        add_marker=marks.append,
        marks=marks,
    )


def test_cases_that_are_not_named_are_thorough() -> None:
    named, other, plain = items = collected("a", "a"), collected("b", "a"), collected("c")
    mark_thorough_cases(items, whole=True)
    assert pytest.mark.thorough in other.marks
    assert pytest.mark.thorough not in named.marks
    assert plain.marks == []


def test_named_cases_exist() -> None:
    items = [collected("a", "a", "z")]
    mark_thorough_cases(items, whole=False)
    with pytest.raises(pytest.UsageError, match="names cases that are not there: .*test.py::test.*'z'"):
        mark_thorough_cases(items, whole=True)
