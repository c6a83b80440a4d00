"""The schedule of a step as a picture: two rows of bars, time by part and time by what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from comfy_tpu.cli.schedule_report import choose_unit, disclaimer
from comfy_tpu.pipeline.atomic import replacing, write_errors
from comfy_tpu.planning.schedule import StepSchedule

_WIDTH, _LEFT, _ROW = 900, 170, 22
_COLOURS = ("#4285f4", "#ea4335")


def write_image(path: Path, step: StepSchedule, title: str) -> None:
    with replacing(path, field="schedule_image") as partial, write_errors(path, field="schedule_image"):
        partial.write_text(draw_schedule(step, title), encoding="utf-8")


def draw_schedule(step: StepSchedule, title: str) -> str:
    """An SVG document. Plain text, because the packages that plot are not installed with the product."""
    groups: list[tuple[str, Mapping[str, float]]] = [
        ("time by part", {str(part): value for part, value in step.seconds_by_part.items() if value > 0}),
        ("time by bound", {k: v for k, v in step.seconds_by_bound.items() if v > 1e-3 * step.seconds}),
    ]
    lines = [
        _text(10, 20, f"{title}: {step.seconds:.3g} s a step", bold=True),
        _text(10, 38, disclaimer(step), size=10),
    ]
    y = 62
    unit, factor = choose_unit(step.seconds)
    for (name, seconds), colour in zip(groups, _COLOURS, strict=True):
        lines.append(_text(10, y, name, bold=True))
        y += _ROW
        for label, value in seconds.items():
            length = (_WIDTH - _LEFT - 120) * value / max(step.seconds, 1e-12)
            lines.append(_text(20, y, label))
            lines.append(f'<rect x="{_LEFT}" y="{y - 12}" width="{length:.1f}" height="15" fill="{colour}"/>')
            lines.append(_text(_LEFT + length + 6, y, f"{value * factor:.3f} {unit}, {value / step.seconds:.0%}"))
            y += _ROW
        y += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" font-family="sans-serif">'
    return "\n".join((head, f'<rect width="{_WIDTH}" height="{y}" fill="white"/>', *lines, "</svg>\n"))


def _text(x: float, y: float, text: str, *, size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}"{weight}>{escape(text)}</text>'
