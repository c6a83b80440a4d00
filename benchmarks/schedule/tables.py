"""The tables of docs/plan.md and docs/design.md that come from schedules: `python -m benchmarks.schedule.tables`.

Rows have the figures as both languages write them; tests/bench/test_schedule_tables.py finds each in the documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CURRENT = HERE / "results" / "current"
"""Steps of the program as it is."""
FIRST = HERE / "results" / "running-maximum"
"""Steps with the first kernel, which followed the running maximum only."""

TILE = [2048, 2048, 1024]
FIRST_BUNDLES = {"v5e": 17_878, "v5p": 18_151, "v6e": 9_975, "v7x": 9_169}
"""Of that kernel for TILE, heads of 128, bfloat16."""
UNITS = ("MATMUL", "VALU", "EUP", "VPOP", "VSTORE", "VSTORE:SPILL")

MEASURED = {"wan-720p-seed": 4.60, "wan-480p-seed": 1.37}
"""Seconds a step on v6e-8, by the authors of ComfyUI-Wan-TPU."""
PARTS = ("attention", "products", "element-wise", "layout changes", "collectives", "memory waits")


def kernel_rows() -> Iterator[str]:
    """Both forms for each chip: bundles, those of the first kernel, what the bounding unit needs, units' slots."""
    measurements = json.loads((HERE / "attention.json").read_text(encoding="utf-8"))["measurements"]
    for found in measurements:
        if found["tile"] == TILE and found["head_dim"] == 128:
            for form in ("bounded", "exact"):
                part = found[form]
                counts = (part["bundles"], FIRST_BUNDLES[found["chip"]], part["bound_bundles"])
                shares = (f"{part['percent'][unit]} %" for unit in UNITS)
                yield _row(f"{found['chip']} | {form}", *(f"{count:,}" for count in counts), *shares)


def step_rows(directory: Path = CURRENT) -> Iterator[str]:
    """Seconds of a step, and of its parts; collectives are what nothing hides."""
    for path in sorted(directory.glob("*.json")):
        step = read_step(path)
        yield _row(path.stem, *(f"{seconds:.{_digits(step)}f}" for seconds in _seconds(step)))


def error_rows(directory: Path = FIRST) -> Iterator[str]:
    """The estimates against the steps that were measured on a TPU."""
    for name, measured in MEASURED.items():
        seconds = read_step(directory / f"{name}.json")["seconds"]
        yield _row(name, f"{seconds:.2f}", f"{measured:.2f}", f"{100 * (seconds / measured - 1):+.1f} %")


def read_step(path: Path) -> dict[str, Any]:
    step: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return step


def _seconds(step: dict[str, Any]) -> tuple[float, ...]:
    return (step["seconds"], *(step["by_part"][part] for part in PARTS))


def _digits(step: dict[str, Any]) -> int:
    return 2 if step["seconds"] >= 0.5 else 4


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    for rows in (kernel_rows(), error_rows(), step_rows()):
        print(*rows, sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
