"""The files of one run: JSON while it goes on, tables and a plot at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from comfy_tpu.bench.markdown import PEER_NAMES, TITLES, seconds, table_of
from comfy_tpu.bench.results import Row, Run, read_runs, write_runs
from comfy_tpu.bench.svg import Bar, bars
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.atomic import check_place, replacing

COMPARED = ("transformer", "vae", "text", "end-to-end")
"""Parts in which peers do the same thing."""


@dataclasses.dataclass(frozen=True)
class Places:
    json: Path | None
    markdown: Path | None
    plot: Path | None
    earlier: tuple[Run, ...] = ()
    """What the JSON file held before."""

    @classmethod
    def check(cls, *, json: Path | None, markdown: Path | None, plot: Path | None) -> Places:
        """Before anything is measured: a place that cannot be written would cost the whole run."""
        for path in filter(None, (json, markdown, plot)):
            check_place(path)
        if plot is not None and plot.suffix != ".svg":
            raise InvalidValueError(f"--plot {plot} is written as SVG; give it a name in .svg")
        earlier = read_runs(json) if json is not None and json.exists() else []
        return cls(json, markdown, plot, tuple(earlier))

    def keep(self, run: Run) -> None:
        if self.json is not None:
            write_runs(self.json, [*self.earlier, run])

    def finish(self, run: Run) -> None:
        for path, text in ((self.markdown, tables), (self.plot, plot)):
            if path is not None:
                with replacing(path) as partial:
                    partial.write_text(text(run), encoding="utf-8")


def tables(run: Run) -> str:
    """Every part of the run, a heading and a table each."""
    found = {title: [(run, row) for row in run.find(part)] for part, title in TITLES.items()}
    return "\n".join(f"### {title}\n\n{table_of(rows)}\n" for title, rows in found.items() if rows)


def plot(run: Run) -> str:
    return plot_of(f"{run.hardware['device']}, {run.model} model, {run.dtype}", run.rows)


def plot_of(title: str, rows: Iterable[Row]) -> str:
    """A bar for every measured peer of the parts that have peers."""
    peers = list(PEER_NAMES)
    entries = [
        Bar(
            f"{row.what} {row.size} {PEER_NAMES[row.peer].strip('*')}",
            row.median_s,
            *row.spread_s,
            seconds(row.median_s),
            peers.index(row.peer),
        )
        for row in rows
        if row.part in COMPARED and row.peer in peers and row.median_s is not None and row.spread_s is not None
    ]
    return bars(f"{title}: seconds, less is better", entries)
