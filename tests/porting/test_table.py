"""docs/porting-table.md is of the classes and the versions that its tool has, and, slowly, what the check says now."""

import re
from pathlib import Path

import pytest

from comfy_tpu.porting.trial import ERROR_MAX
from tests.pins import only_with_the_pinned
from tools.porting_table.page import CLASSES, row, versions, versions_line

ROOT = Path(__file__).parents[2]


def page():
    return (ROOT / "docs" / "porting-table.md").read_text(encoding="utf-8")


def rows():
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page().splitlines()]
    return [cells for cells in found if cells and cells[0].startswith("`")]


def test_every_class_has_its_row():
    assert [row[0].strip("`") for row in rows()] == list(CLASSES), "run `make porting-table`"


@only_with_the_pinned(versions())
def test_it_was_made_with_what_is_pinned():
    assert versions_line() in page(), "docs/porting-table.md is stale; run `make porting-table`"


def test_what_will_run_agrees_with_pytorch_and_what_will_not_has_a_reason():
    for name, verdict, error, stops, _, _, why in rows():
        assert verdict in ("will run", "will not run", "not tried"), name
        if verdict == "will run":
            assert float(error) <= ERROR_MAX, name
            assert (stops, why) == ("", ""), name
        else:
            assert why, name


@pytest.mark.slow
@only_with_the_pinned(versions())
@pytest.mark.parametrize("name", CLASSES)
def test_the_check_still_says_so(name):
    (written,) = (cells for cells in rows() if cells[0] == f"`{name}`")
    made = row(name)
    assert without_error(made) == without_error(written), "run `make porting-table`"
    assert (made[2] == "") == (written[2] == "")


def without_error(cells):
    """The figure differs from processor to processor; that it is small enough, the verdict says."""
    return [*cells[:2], *cells[3:]]
