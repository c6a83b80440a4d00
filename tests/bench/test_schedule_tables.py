"""The documents say what the schedules that are kept say, in both languages."""

import json
from pathlib import Path

import pytest

from benchmarks.schedule import tables
from benchmarks.schedule.steps import STEPS
from comfy_tpu.kernels import tuning

DOCS = Path(__file__).parents[2] / "docs"
LIMITS = {"v5e": 1.1, "v5p": 15_500, "v6e": 6_600, "v7x": 6_400}
"""Of the bounded form: bundles, or how many times those of its matrix slots."""


def figures(row: str) -> str:
    """A row without its first cells, which are words."""
    cells = row.strip("| ").split(" | ")
    first = next(index for index, cell in enumerate(cells) if cell.strip("+-%,. ").replace(",", "")[:1].isdigit())
    return " | ".join(cells[first:]) + " |"


def find_rows(name: str) -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return [line.replace("*", "") for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("suffix", [".md", ".zh-CN.md"])
@pytest.mark.parametrize(
    ("page", "rows"),
    [
        ("design", list(tables.kernel_rows())),
        ("plan", [*tables.error_rows(), *tables.step_rows()]),
    ],
    ids=["kernel", "steps"],
)
def test_every_row_is_in_the_documents(page: str, rows: list[str], suffix: str) -> None:
    written = find_rows(page + suffix)
    missing = [row for row in rows if not any(figures(row) in line for line in written)]
    assert not missing, "python -m benchmarks.schedule.tables prints what is to be written"


def test_kernels_are_within_their_limits() -> None:
    rows = json.loads((tables.HERE / "attention.json").read_text(encoding="utf-8"))["measurements"]
    found = {row["chip"]: row for row in rows if row["tile"] == tables.TILE}
    assert set(found) == set(tuning.VMEM_LIMIT)
    for chip, row in found.items():
        limit = LIMITS[chip] if LIMITS[chip] > 2 else LIMITS[chip] * row["bounded"]["bound_bundles"]
        assert row["bounded"]["bundles"] <= limit, chip
        assert row["exact"]["bundles"] <= tables.FIRST_BUNDLES[chip], chip


def test_estimates_are_within_their_limits() -> None:
    steps = {path.stem: tables.read_step(path) for path in tables.CURRENT.glob("*.json")}
    assert set(steps) <= set(STEPS)
    assert steps["wan-720p-auto"]["seconds"] <= 3.1
    assert steps["wan-720p-auto"]["collectives"]["exposed"] <= 0.1 * steps["wan-720p-auto"]["seconds"]
    assert steps["wan-720p-no-guidance-sp8"]["seconds"] <= 1.7
    for step in steps.values():
        assert "An estimate by the static schedules" in step["estimate"]
        assert "nothing ran on a TPU" in step["estimate"]
        assert step["compiler"].startswith("libtpu ")


@pytest.mark.parametrize("name", tables.MEASURED)
def test_the_first_kernel_in_the_seeds_layout_takes_what_was_measured(name: str) -> None:
    step = tables.read_step(tables.FIRST / f"{name}.json")
    assert step["mesh"] == {"dp": 2, "sp": 1, "tp": 4}
    assert step["seconds"] == pytest.approx(tables.MEASURED[name], rel=0.15)
