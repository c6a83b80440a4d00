"""Cost against tokens and devices: curves with fitted exponents, from "scaling" and forwards of other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comfy_tpu.bench.plots import Series, draw_curves
from comfy_tpu.bench.results import Row, Run
from comfy_tpu.bench.tables import peer_name, render

TOKENS, DEVICES = "tokens", "devices"
_TITLES = {
    TOKENS: ("A forward against its tokens", "tokens", "seconds"),
    DEVICES: ("A forward of the small model on virtual CPU devices", "devices", "seconds, on the same cores"),
}

Found = Sequence[tuple[Run, Row]]
"""Rows with their runs, whose commands have the options of the peers."""


def make_series(found: Found) -> dict[str, list[Series]]:
    """By what it is plotted against. Counted operations are drawn through the first measured point of ours."""
    measured = _distinct_sizes(found)
    over_devices = [row for _, row in measured if DEVICES in row.facts]
    over_tokens = [(name, row) for name, row in measured if DEVICES not in row.facts]
    by_tokens = [
        _series(name, {row.facts[TOKENS]: row.median_s or 0.0 for other, row in over_tokens if other == name})
        for name in dict.fromkeys(name for name, _ in over_tokens)
    ]
    ours = [row for _, row in over_tokens if row.peer == "ours"]
    by_tokens += _through_first("operations, counted", ours, {row.facts[TOKENS]: row.flops or 0.0 for row in ours})
    by_devices = []
    if over_devices:
        by_devices.append(_series("wall time", {row.facts[DEVICES]: row.median_s or 0.0 for row in over_devices}))
        counted = {row.facts[DEVICES]: row.facts["flops_per_device"] for row in over_devices}
        by_devices += _through_first("operations a device, by XLA", over_devices, counted)
    drawn = {TOKENS: by_tokens, DEVICES: by_devices}
    return {against: [one for one in series if one.exponent is not None] for against, series in drawn.items()}


def plots(found: Found) -> dict[str, str]:
    """SVG by what it is plotted against."""
    return {against: draw_curves(*_TITLES[against], series) for against, series in make_series(found).items() if series}


def exponents(found: Found) -> str:
    """A table; empty if there is nothing to fit."""
    lines = [
        [one.name, against, f"{min(one.x):,.0f} – {max(one.x):,.0f}", f"{one.exponent:.2f}"]
        for against, series in make_series(found).items()
        for one in series
    ]
    return render(["what", "against", "from – to", "exponent"], lines) if lines else ""


def _distinct_sizes(found: Found) -> list[tuple[str, Row]]:
    """Rows with the names of their peers. A forward that was measured twice, from the first of the two: rows of
    "scaling" were measured in one process."""
    distinct: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for run, row in found:
        if row.median_s is not None:
            name = peer_name(run, row).strip("*")
            distinct.setdefault((row.what, name, row.size), (name, row))
    return list(distinct.values())


def _series(name: str, points: Mapping[float, float]) -> Series:
    ordered = sorted(points)
    return Series(name, tuple(ordered), tuple(points[x] for x in ordered))


def _through_first(name: str, rows: list[Row], counted: Mapping[float, float]) -> list[Series]:
    if not counted or not all(counted.values()):
        return []
    first = min(counted)
    seconds = next(row.median_s or 0.0 for row in rows if first in (row.facts.get(TOKENS), row.facts.get(DEVICES)))
    return [_series(name, {x: value / counted[first] * seconds for x, value in counted.items()})]
