"""How cost grows, as curves with fitted exponents, from the rows of the part "scaling" and forwards of other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from comfy_tpu.bench.markdown import PEER_NAMES, render
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.svg import Series, curves

TOKENS, DEVICES = "tokens", "devices"
_TITLES = {
    TOKENS: ("A forward against its tokens", "tokens", "seconds"),
    DEVICES: ("A forward of the small model on virtual CPU devices", "devices", "seconds, of all on the same cores"),
}


def series_of(rows: Iterable[Row]) -> dict[str, list[Series]]:
    """By what it is plotted against. Counted operations are drawn through the first measured point of ours."""
    measured = _of_distinct_sizes(row for row in rows if row.median_s is not None)
    over_devices = [row for row in measured if DEVICES in row.facts]
    over_tokens = [row for row in measured if DEVICES not in row.facts]
    by_tokens = [
        _series(PEER_NAMES[peer].strip("*"), {row.facts[TOKENS]: row.median_s or 0.0 for row in own})
        for peer in PEER_NAMES
        if (own := [row for row in over_tokens if row.peer == peer])
    ]
    ours = [row for row in over_tokens if row.peer == "ours"]
    by_tokens += _through_first(
        "operations, by the formula", ours, {row.facts[TOKENS]: row.flops or 0.0 for row in ours}
    )
    by_devices = []
    if over_devices:
        by_devices.append(_series("wall time", {row.facts[DEVICES]: row.median_s or 0.0 for row in over_devices}))
        counted = {row.facts[DEVICES]: row.facts["flops_per_device"] for row in over_devices}
        by_devices += _through_first("operations a device, by XLA", over_devices, counted)
    found = {TOKENS: by_tokens, DEVICES: by_devices}
    return {against: [one for one in series if one.exponent is not None] for against, series in found.items()}


def plots(rows: Iterable[Row]) -> dict[str, str]:
    """SVG by what it is plotted against."""
    return {against: curves(*_TITLES[against], series) for against, series in series_of(rows).items() if series}


def exponents(rows: Iterable[Row]) -> str:
    """A table; empty if there is nothing to fit."""
    lines = [
        [one.name, against, f"{min(one.x):,.0f} – {max(one.x):,.0f}", f"{one.exponent:.2f}"]
        for against, series in series_of(rows).items()
        for one in series
    ]
    return render(["what", "against", "from – to", "exponent"], lines) if lines else ""


def _of_distinct_sizes(rows: Iterable[Row]) -> list[Row]:
    """A forward that was measured twice, from the first of the two: rows of "scaling" were measured in one process."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        found.setdefault((row.what, row.peer, row.size), row)
    return list(found.values())


def _series(name: str, points: Mapping[float, float]) -> Series:
    ordered = sorted(points)
    return Series(name, tuple(ordered), tuple(points[x] for x in ordered))


def _through_first(name: str, rows: list[Row], counted: Mapping[float, float]) -> list[Series]:
    if not counted or not all(counted.values()):
        return []
    first = min(counted)
    seconds = next(row.median_s or 0.0 for row in rows if first in (row.facts.get(TOKENS), row.facts.get(DEVICES)))
    return [_series(name, {x: value / counted[first] * seconds for x, value in counted.items()})]
