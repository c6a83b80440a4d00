"""Figures that others reported for a TPU slice, each with the command that measures the same here.

They are in `reported_figures.json` as their documents have them. Nobody of this project measured them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.page_texts import FigureTexts
from comfy_tpu.bench.tables import render_table
from comfy_tpu.config import VAE_BACKEND, VaeBackend
from comfy_tpu.json_input import read_json

_FILE = Path(__file__).with_name("reported_figures.json")
_UNNAMED_SIZE = "720P"
"""For figures of a document that names no size: 84 s and 1.0 s are what the other document has for the VAE at 720P."""
_STEPS = 50
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "transformer": ("transformer",),
    "vae": ("vae",),
    "end-to-end": ("end-to-end",),
    "vae, cold": ("vae", "compile"),
    "vae, warm": ("vae", "compile"),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of a document's table."""

    source: str
    what: str
    """A key of `_PARTS`."""
    mesh: str
    size: str = ""
    """Empty: the document does not name it."""
    backend: VaeBackend = VAE_BACKEND
    first_s: float | None = None
    """The warm-up: compiled, or taken from the compile cache."""
    later_s: float | None = None
    step_s: float | None = None

    def job(self, model: str) -> Job:
        """What measures the same."""
        return Job(
            parts=_PARTS[self.what],
            sizes=() if self.what == "text" else (self.size or _UNNAMED_SIZE,),
            peers=("ours",),
            model=model,
            mesh=self.mesh,
            vae_backend=self.backend,
            steps=_STEPS,
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """A document."""

    title: str
    hardware: str
    model: str
    model_name: str
    """As the document calls it."""


def read_figures(path: Path = _FILE) -> tuple[dict[str, Source], list[Figure]]:
    content: dict[str, Any] = read_json(path)
    sources = {key: Source(**source) for key, source in content["sources"].items()}
    return sources, [Figure(**figure) for figure in content["figures"]]


def format_figures(texts: FigureTexts) -> str:
    """The section of a page: every figure beside its command, a table for each document."""
    sources, figures = read_figures()
    models = " / ".join(dict.fromkeys(source.model_name for source in sources.values()))
    introduction = texts.introduction.format(model=models, steps=_STEPS, size=_UNNAMED_SIZE)
    lines = [f"## {texts.heading}", "", introduction, ""]
    for key, source in sources.items():
        rows = [_row(figure, source, texts) for figure in figures if figure.source == key]
        lines += [f"### {source.title}", "", render_table(texts.columns, rows, padded=False), ""]
    return "\n".join(lines)


def _row(figure: Figure, source: Source, texts: FigureTexts) -> Sequence[str]:
    seconds = [figure.first_s, figure.later_s, figure.step_s]
    return [
        texts.whats[figure.what],
        figure.size or texts.unnamed,
        figure.mesh,
        figure.backend if "vae" in figure.what else "",
        *("" if value is None else f"{value:g} s" for value in seconds),
        f"`{figure.job(source.model).command}`",
    ]
