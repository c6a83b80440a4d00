"""docs/aten-operators.md is what its tool writes: the page of its columns, and each column by itself."""

import functools
from pathlib import Path

import pytest

from comfy_tpu.bridge.catalogue import Row, overloads
from tests.pins import only_with_the_pinned
from tools.aten_operators.page import make_page, read_page, versions
from tools.aten_operators.usage import SMALL, check_small_models, find_compared, find_used

ROOT = Path(__file__).parents[2]
STALE = "docs/aten-operators.md is stale; run `make aten-operators`"

CHEAP = ("LTX-Video",)
"""Families that are traced by default; between them they have blocks of one and of two streams, and a causal VAE."""

pinned = only_with_the_pinned(versions())


@functools.cache
def written() -> str:
    return (ROOT / "docs" / "aten-operators.md").read_text(encoding="utf-8")


def columns() -> tuple[set[Row], dict[str, set[Row]]]:
    return read_page(written())


@pinned
def test_the_page_lists_every_operator_that_a_trace_knows() -> None:
    compared, used = columns()
    assert list(used) == list(SMALL)
    assert make_page(compared, used) == written(), STALE


@pinned
def test_compared_operators_are_those_of_the_parity_tests() -> None:
    assert columns()[0] == find_compared(), STALE


@pinned
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.slow]) for name in SMALL]
)
def test_used_operators_are_those_that_a_family_is_traced_to(family: str) -> None:
    assert columns()[1][family] == find_used(family), STALE


def test_every_family_has_a_small_model() -> None:
    check_small_models()


def test_no_operator_is_listed_twice_in_one_way() -> None:
    rows = list(overloads())
    assert len(rows) == len(set(rows))
    decomposed_anyway = {row.name for row, listed in overloads().items() if row.kind == "decomposition" and not listed}
    others = {row.name for row in rows if row.kind != "decomposition"}
    assert decomposed_anyway & others == set()
