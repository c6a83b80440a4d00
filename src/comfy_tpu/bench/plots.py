"""Plots as SVG text: bars with their spread, and the cost of a forward against tokens and devices with fitted lines.

The same figures make the same text, so that a page can be compared with its results.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from comfy_tpu.bench.page_texts import ENGLISH, PageTexts
from comfy_tpu.bench.results import Row, Run
from comfy_tpu.bench.tables import format_seconds, peer_name, render_table
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#1a73e8", "#9aa0a6", "#f29900", "#188038", "#d93025", "#9334e6")
_NOT_IN_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_STYLE = {"svg.hashsalt": "comfy-tpu", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
"""Text stays text, and ids do not depend on the time."""
_CURVES = {
    "tokens": ("A forward against its tokens", "tokens", "seconds"),
    "devices": ("A forward of the small model on virtual CPU devices", "devices", "seconds, on the same cores"),
}
"""Title and axes, by the fact that is plotted against."""
_WALL_TIME = "wall time"
_COUNTED = {"tokens": "operations, counted", "devices": "operations a device, by XLA"}
_TRANSLATED = (_WALL_TIME, *_COUNTED.values())
"""Names of series that are words; the others are names of peers."""


@dataclasses.dataclass(frozen=True)
class Bar:
    label: str
    value: float
    low: float
    high: float
    colour: int = 0


@dataclasses.dataclass(frozen=True)
class Series:
    name: str
    points: dict[float, float]
    """At least two."""

    @property
    def fit(self) -> tuple[float, float]:
        """a and b of the line a·x^b through the points, by least squares on logarithms."""
        x, y = ([math.log(value) for value in values] for values in (self.points, self.points.values()))
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        # Not statistics.linear_regression, whose last digit is another in Python 3.12, and so would be the plots'.
        slope = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y, strict=True)) / sum((p - mean_x) ** 2 for p in x)
        return math.exp(mean_y - slope * mean_x), slope


def check_libraries() -> None:
    """Raises UnsupportedError where the libraries of tables and plots are missing."""
    missing = [name for name in ("matplotlib", "tabulate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"benchmarks need {' and '.join(missing)} for their tables and plots; {install_command('bench')}"
        )


def draw_bars(title: str, bars: Sequence[Bar]) -> str:
    """Seconds, horizontal, from zero, each with its smallest and largest sample."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.8 + 0.28 * max(len(bars), 1)), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(bars))
        axes.barh(places, [bar.value for bar in bars], color=[_colour(bar.colour) for bar in bars])
        axes.hlines(places, [bar.low for bar in bars], [bar.high for bar in bars], color="#202124")
        for place, bar in enumerate(bars):
            end = (max(bar.value, bar.high), place)
            axes.annotate(format_seconds(bar.value), end, (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontweight="bold")  # labels may be long
        return _svg(figure)


def draw_curves(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """Both axes logarithmic: a power of x is a straight line, and the legend has its slope."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel=x_title, ylabel=y_title)
        for index, one in enumerate(series):
            (factor, slope), x = one.fit, list(one.points)
            label = f"{one.name}: slope {slope:.2f}"
            axes.scatter(x, list(one.points.values()), color=_colour(index), s=20, label=label)
            ends = [min(x), max(x)]
            axes.plot(ends, [factor * end**slope for end in ends], color=_colour(index), linewidth=1)
        number = FuncFormatter(lambda value, place: f"{value:,.0f}" if value >= 10 else f"{value:.3g}")
        axes.set_xticks(sorted({x for one in series for x in one.points}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(number)
        axes.yaxis.set_major_formatter(number)
        axes.grid(color="#e8eaed")
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with warnings.catch_warnings():
        # Names come from files, in any script. Text stays text, so that the reader's own fonts show them.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    lines = _NOT_IN_XML.sub("", text.getvalue()).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def make_series(rows: Sequence[tuple[Run, Row]]) -> dict[str, list[Series]]:
    """Cost by what it is plotted against. A forward that was measured twice counts as the first of the two says: rows
    of "scaling" were measured in one process. Counted operations are drawn through the first measured point of ours."""
    first: dict[tuple[str, str, str], Row] = {}
    for run, row in rows:
        if row.median_s is not None:
            first.setdefault((row.what, peer_name(run, row).strip("*"), row.size), row)
    measured: dict[str, dict[str, dict[float, float]]] = {against: {} for against in _CURVES}
    counted: dict[str, dict[float, float]] = {against: {} for against in _CURVES}
    for (_, name, _), row in first.items():
        against = "devices" if "devices" in row.facts else "tokens"
        x, label = row.facts[against], _WALL_TIME if against == "devices" else name
        measured[against].setdefault(label, {})[x] = row.median_s or 0.0
        if row.peer == "ours":
            counted[against][x] = row.facts.get("flops_per_device", row.flops) or 0.0
    for against, label in _COUNTED.items():
        operations = counted[against]
        if operations and all(operations.values()):
            x = min(operations)
            seconds_there = next(points[x] for points in measured[against].values() if x in points)
            measured[against][label] = {at: count / operations[x] * seconds_there for at, count in operations.items()}
    return {
        against: [Series(name, dict(sorted(points.items()))) for name, points in series.items() if len(points) > 1]
        for against, series in measured.items()
    }


def draw_scaling(rows: Sequence[tuple[Run, Row]]) -> dict[str, str]:
    """SVG by what it is plotted against."""
    return {against: draw_curves(*_CURVES[against], series) for against, series in make_series(rows).items() if series}


def exponent_table(rows: Sequence[tuple[Run, Row]], texts: PageTexts = ENGLISH) -> str:
    """Empty if there is nothing to fit."""
    lines = [
        [
            texts.translate(one.name) if one.name in _TRANSLATED else one.name,
            texts.translate(against),
            f"{min(one.points):,.0f} – {max(one.points):,.0f}",
            f"{one.fit[1]:.2f}",
        ]
        for against, series in make_series(rows).items()
        for one in series
    ]
    titles = [texts.translate(title) for title in ("what", "against", "from – to", "exponent")]
    return render_table(titles, lines, padded=texts.is_english) if lines else ""
