"""That what runs by default covers what it is said to cover."""

import itertools

import pytest

from tests.covering import covering, covering_rows


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


def test_thorough_cases_are_neither_default_nor_slow() -> None:
    parameters = covering("letter, number", "ab", [1, 2], strength=0, always=[("a", 1)], thorough=[("b", 2)]).args[1]
    marks = {parameter.values: [mark.name for mark in parameter.marks] for parameter in parameters}
    assert marks == {("a", 1): [], ("a", 2): ["slow"], ("b", 1): ["slow"], ("b", 2): ["thorough"]}


def test_cases_that_are_always_run_count_for_the_others() -> None:
    parameters = covering("letter, number", "ab", [1, 2], strength=1, always=[("a", 2), ("b", 2)]).args[1]
    assert {parameter.values for parameter in parameters if not parameter.marks} == {("a", 2), ("b", 2), ("a", 1)}
