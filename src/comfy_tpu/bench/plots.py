"""Two plots as SVG text: bars with their spread, and points on logarithmic axes with a fitted line.

The same figures make the same text, so that a page can be compared with its results.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from comfy_tpu.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#1a73e8", "#9aa0a6", "#f29900", "#188038", "#d93025", "#9334e6")
_STYLE = {"svg.hashsalt": "comfy-tpu", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
"""Text stays text, and ids do not depend on the time."""


@dataclasses.dataclass(frozen=True)
class Bar:
    label: str
    value: float
    low: float
    high: float
    text: str
    colour: int = 0


@dataclasses.dataclass(frozen=True)
class Series:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def fit(self) -> tuple[float, float] | None:
        """a and b of the line a·x^b through the points, by least squares on logarithms; None for fewer than two."""
        if len(set(self.x)) < 2:
            return None
        a, b = [math.log(value) for value in self.x], [math.log(value) for value in self.y]
        mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
        slope = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True)) / sum((p - mean_a) ** 2 for p in a)
        return math.exp(mean_b - slope * mean_a), slope

    @property
    def exponent(self) -> float | None:
        return None if self.fit is None else self.fit[1]


def check_libraries() -> None:
    """Raises UnsupportedError where the libraries of tables and plots are missing."""
    missing = [name for name in ("matplotlib", "tabulate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"benchmarks need {' and '.join(missing)} for their tables and plots; pip install 'comfy-tpu[bench]'"
        )


def draw_bars(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal, from zero, each with its smallest and largest sample."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.8 + 0.28 * max(len(bars), 1)), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(bars))
        axes.barh(places, [bar.value for bar in bars], color=[_colour(bar.colour) for bar in bars])
        axes.hlines(places, [bar.low for bar in bars], [bar.high for bar in bars], color="#202124")
        for place, bar in zip(places, bars, strict=True):
            axes.annotate(bar.text, (max(bar.value, bar.high), place), (5, 0), textcoords="offset points", va="center")
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
            label = one.name if one.fit is None else f"{one.name}: slope {one.fit[1]:.2f}"
            axes.scatter(one.x, one.y, color=_colour(index), s=20, label=label)
            if one.fit is not None:
                ends = [min(one.x), max(one.x)]
                axes.plot(ends, [one.fit[0] * x ** one.fit[1] for x in ends], color=_colour(index), linewidth=1)
        number = FuncFormatter(lambda value, place: f"{value:,.0f}" if value >= 10 else f"{value:.3g}")
        axes.set_xticks(sorted({x for one in series for x in one.x}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(number)
        axes.yaxis.set_major_formatter(number)
        axes.grid(color="#e8eaed")
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", fontweight="bold")
        if series:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
