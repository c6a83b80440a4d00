"""The files of one run: JSON while it goes on, tables and a plot at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from comfy_tpu.bench.plots import Bar, check_libraries, draw_bars
from comfy_tpu.bench.results import Row, Run, read_runs, write_runs
from comfy_tpu.bench.tables import PEER_NAMES, TITLES, make_table, peer_name, seconds
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.atomic import check_place, replacing, write_errors
from comfy_tpu.pipeline.path_conflicts import check_conflicts

COMPARED = ("transformer", "vae", "text", "end-to-end")
"""Parts whose peers compute the same."""


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
        check_libraries()
        given = {"json": json, "markdown": markdown, "plot": plot}
        places = [(field, path) for field, path in given.items() if path is not None]
        for field, path in places:
            check_place(path, field=field)
        check_conflicts(places)
        if plot is not None and plot.suffix != ".svg":
            raise InvalidValueError(f"plot={plot} is written as SVG; give it a name in .svg", field="plot")
        earlier = read_runs(json) if json is not None and json.exists() else []
        return cls(json, markdown, plot, tuple(earlier))

    def keep(self, run: Run) -> None:
        if self.json is not None:
            write_runs(self.json, [*self.earlier, run], field="json")

    def finish(self, run: Run) -> None:
        for field, path, text in (("markdown", self.markdown, tables), ("plot", self.plot, plot)):
            if path is not None:
                with replacing(path, field=field) as partial, write_errors(path, field=field):
                    partial.write_text(text(run), encoding="utf-8")


def tables(run: Run) -> str:
    """Every part of the run, a heading and a table each."""
    found = {title: [(run, row) for row in run.find(part)] for part, title in TITLES.items()}
    return "\n".join(f"### {title}\n\n{make_table(rows)}\n" for title, rows in found.items() if rows)


def plot(run: Run) -> str:
    return draw_peers(f"{run.hardware['device']}, {run.model}, {run.dtype}", [(run, row) for row in run.rows])


def draw_peers(title: str, found: Iterable[tuple[Run, Row]]) -> str:
    """A bar for every measured peer of the parts that have peers."""
    peers = list(PEER_NAMES)
    entries = [
        Bar(
            f"{row.what} {row.size} {peer_name(run, row).strip('*')}",
            row.median_s,
            *row.spread_s,
            seconds(row.median_s),
            peers.index(row.peer),
        )
        for run, row in found
        if row.part in COMPARED and row.peer in peers and row.median_s is not None and row.spread_s is not None
    ]
    return draw_bars(f"{title}: seconds, less is better", entries)
