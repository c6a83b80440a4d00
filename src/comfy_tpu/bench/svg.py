"""Two small plots as SVG text: bars with their spread, and points on logarithmic axes with a fitted line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

_COLOURS = ("#1a73e8", "#9aa0a6", "#f29900", "#188038", "#d93025", "#9334e6")
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'
_CHARACTER = 7
"""Pixels of one, about: a label has to fit before its bar."""


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
    def exponent(self) -> float | None:
        """b of the line a·x^b through the points, by least squares on logarithms; None for fewer than two points."""
        return None if len(set(self.x)) < 2 else _fit(self.x, self.y)[1]


def bars(title: str, entries: Sequence[Bar]) -> str:
    """Horizontal, from zero, each with its smallest and largest sample."""
    width, step = 420, 26
    left = max(300, 16 + _CHARACTER * max((len(entry.label) for entry in entries), default=0))
    height = 50 + step * len(entries)
    most = max((entry.high for entry in entries), default=1.0) or 1.0
    parts = [_text(10, 22, title, weight="600")]
    for index, entry in enumerate(entries):
        y = 40 + index * step
        length, low, high = (value / most * width for value in (entry.value, entry.low, entry.high))
        parts += [
            _text(left - 8, y + 13, entry.label, anchor="end"),
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="18" fill="{_colour(entry.colour)}"/>',
            f'<path d="M{left + low:.1f} {y + 9}H{left + high:.1f}" stroke="#202124" stroke-width="1.5"/>',
            _text(left + max(length, high) + 8, y + 13, entry.text),
        ]
    return _document(left + width + 130, height, parts)


def curves(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """Both axes logarithmic: a power of x is a straight line, and its slope stands in the legend."""
    left, top, width, height = 70, 40, 460, 300
    xs = [value for one in series for value in one.x]
    ys = [value for one in series for value in one.y]
    if not xs:
        return _document(400, 60, [_text(10, 22, title, weight="600")])
    (x_low, x_high), (y_low, y_high) = _range(xs), _range(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - math.log(x_low)) / (math.log(x_high) - math.log(x_low))
        up = (math.log(y) - math.log(y_low)) / (math.log(y_high) - math.log(y_low))
        return left + across * width, top + (1 - up) * height

    parts = [_text(10, 22, title, weight="600")]
    parts.append(f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#5f6368"/>')
    for value in sorted(set(xs)):
        x, _ = place(value, y_low)
        parts.append(_text(x, top + height + 16, _number(value), anchor="middle"))
        parts.append(f'<path d="M{x:.1f} {top}V{top + height}" stroke="#e8eaed"/>')
    for value in _ticks(y_low, y_high):
        _, y = place(x_low, value)
        parts.append(_text(left - 6, y + 4, _number(value), anchor="end"))
        parts.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#e8eaed"/>')
    for index, one in enumerate(series):
        colour = _colour(index)
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
            for x, y in (place(*point) for point in zip(one.x, one.y, strict=True))
        ]
        exponent = one.exponent
        if exponent is not None:
            factor = _fit(one.x, one.y)[0]
            ends = [place(x, _clamped(factor * x**exponent, y_low, y_high)) for x in (min(one.x), max(one.x))]
            parts.append(
                f'<path d="M{ends[0][0]:.1f} {ends[0][1]:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}" stroke="{colour}"/>'
            )
        slope = "" if exponent is None else f": slope {exponent:.2f}"
        parts.append(f'<rect x="{left + width + 16}" y="{top + 20 * index}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(left + width + 32, top + 9 + 20 * index, one.name + slope))
    parts.append(_text(left + width / 2, top + height + 36, x_title, anchor="middle"))
    parts.append(_text(left - 60, top - 6, y_title))
    return _document(left + width + 330, top + height + 50, parts)


def _fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    a, b = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    slope = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True)) / sum((p - mean_a) ** 2 for p in a)
    return math.exp(mean_b - slope * mean_a), slope


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return low / 1.15, high * 1.15


def _ticks(low: float, high: float) -> list[float]:
    found = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digit in (1, 2, 5)
    ]
    return [value for value in found if low <= value <= high]


def _clamped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" {_FONT}>'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"
