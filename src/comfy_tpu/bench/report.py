"""The files of a run (JSON while it goes on, tables and a plot at its end), and docs/performance.md, which is made from
the JSON of runs alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from comfy_tpu.bench.job import SMALL_MODEL
from comfy_tpu.bench.page_texts import ENGLISH, Language, PageTexts, read_texts
from comfy_tpu.bench.plots import Bar, check_libraries, draw_bars, draw_scaling, exponent_table
from comfy_tpu.bench.reported import format_figures
from comfy_tpu.bench.results import Row, Run, read_runs, write_runs
from comfy_tpu.bench.tables import PEER_NAMES, TITLES, make_table, peer_name, render_table
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import family_cards
from comfy_tpu.pipeline.atomic import check_place, replacing, write_errors
from comfy_tpu.pipeline.path_conflicts import check_conflicts

Rows = list[tuple[Run, Row]]
"""Rows, each with the run that it is compared within."""

_CPU_REMARK = " A CPU shows that everything runs and what it costs to start; speed is measured on accelerators."
_COMPARED = ("transformer", "vae", "text", "end-to-end")
"""Parts whose peers compute the same."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    json: Path | None
    markdown: Path | None
    plot: Path | None
    earlier: tuple[Run, ...] = ()
    """What the JSON file held before."""

    @classmethod
    def check(cls, *, json: Path | None = None, markdown: Path | None = None, plot: Path | None = None) -> RunFiles:
        """Before anything is measured: a place that cannot be written would cost the whole run."""
        check_libraries()
        given = {"json": json, "markdown": markdown, "plot": plot}
        places = [(field, path) for field, path in given.items() if path is not None]
        for field, path in places:
            check_place(path, field=field)
        check_conflicts(places)
        if plot is not None and plot.suffix != ".svg":
            raise InvalidValueError(f"plot={plot} is written as SVG; give it a name in .svg", field="plot")
        return cls(json, markdown, plot, tuple(read_runs(json)) if json is not None and json.exists() else ())

    def keep(self, run: Run) -> None:
        if self.json is not None:
            write_runs(self.json, [*self.earlier, run], field="json")

    def finish(self, run: Run) -> None:
        if self.markdown is not None:
            write_texts({self.markdown: format_tables(run)}, field="markdown")
        if self.plot is not None:
            write_texts({self.plot: draw_run(run)}, field="plot")


def write_texts(texts: Mapping[Path, str], *, field: str = "output") -> None:
    """`field`: as in `check_place`."""
    for path, text in texts.items():
        with replacing(path, field=field) as partial, write_errors(path, field=field):
            partial.write_text(text, encoding="utf-8")


def format_tables(run: Run) -> str:
    """Every part of the run, a heading and a table each."""
    rows = {title: [(run, row) for row in run.find(part)] for part, title in TITLES.items()}
    return "\n".join(f"### {title}\n\n{make_table(rows[title])}\n" for title in rows if rows[title])


def draw_run(run: Run) -> str:
    return draw_peers(f"{run.hardware['device']}, {run.model}, {run.dtype}", [(run, row) for row in run.rows])


def draw_peers(title: str, rows: Iterable[tuple[Run, Row]]) -> str:
    """A bar for every measured peer of the parts that have peers."""
    peers = list(PEER_NAMES)
    bars = [
        Bar(
            f"{row.what} {row.size} {peer_name(run, row).strip('*')}",
            row.median_s,
            *row.spread_s,
            peers.index(row.peer),
        )
        for run, row in rows
        if row.part in _COMPARED and row.peer in peers and row.median_s is not None and row.spread_s is not None
    ]
    return draw_bars(f"{title}: seconds, less is better", bars)


_PEERS = "peers"


@dataclasses.dataclass(frozen=True)
class Chapter:
    """Runs of one kind of device with one model and mesh."""

    device: str
    model: str
    dtype: str
    mesh: str

    @classmethod
    def find(cls, run: Run) -> Chapter:
        first = family_cards()[0]
        renamed = {"full": first.node_sets[0].hub_models[0], SMALL_MODEL: f"{SMALL_MODEL}:{first.name}"}
        mesh = "" if run.mesh == Run.mesh else run.mesh
        return cls(str(run.hardware["device"]), renamed.get(run.model, run.model), run.dtype, mesh)

    @property
    def title(self) -> str:
        return self.translated_title(ENGLISH)

    def translated_title(self, texts: PageTexts) -> str:
        kind, _, family = self.model.partition(":")
        titles = {card.name: card.title for card in family_cards()}
        small = texts.translate("a small {family}").format(family=titles.get(family, family))
        model = small if kind == SMALL_MODEL else self.model.rpartition("/")[2]
        mesh = self.mesh and texts.translate("mesh {mesh}").format(mesh=self.mesh)
        return texts.translate(", ").join(filter(None, [self.device, model, self.dtype, mesh]))

    @property
    def slug(self) -> str:
        words = f"{self.device} {self.model.rpartition('/')[2]} {self.dtype} {self.mesh}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")

    def draw(self, runs: Sequence[Run]) -> dict[str, str]:
        """The plots by what they show: the peers, if any were measured, and the cost against this or that. Their words
        are English in every language."""
        found = {part: latest_rows(runs, part) for part in TITLES}
        plots = {}
        if any(row.samples for part in found for _, row in found[part] if part != "scaling"):
            plots[_PEERS] = draw_peers(self.title, [one for rows in found.values() for one in rows])
        return plots | draw_scaling([*found["scaling"], *found["transformer"]])

    def plot_name(self, stem: str, shown: str) -> str:
        """The name of a plot's file. `stem`: of the page's name."""
        return f"{stem}-{self.slug}.svg" if shown == _PEERS else f"{stem}-{self.slug}-{shown}.svg"

    def format(self, runs: Sequence[Run], stem: str, plots: Collection[str], texts: PageTexts = ENGLISH) -> str:
        """The text. `plots`: what the plots of these runs show."""
        lines = [f"## {self.translated_title(texts)}", "", _machine_line(runs[-1], texts), ""]
        found = {part: latest_rows(runs, part) for part in TITLES}
        if _PEERS in plots:
            lines += [f"![{texts.translate('seconds by peer')}]({self.plot_name(stem, _PEERS)})", ""]
        for part, title in TITLES.items():
            if found[part]:
                lines += [f"### {texts.translate(title)}", "", make_table(found[part], texts), ""]
        for against in (shown for shown in plots if shown != _PEERS):
            shown = texts.translate("cost against {against}").format(against=texts.translate(against))
            lines += [f"![{shown}]({self.plot_name(stem, against)})", ""]
        if table := exponent_table([*found["scaling"], *found["transformer"]], texts):
            lines += [table, ""]
        used = [run for run in runs if any(run is one for rows in found.values() for one, _ in rows)]
        lines += [f"### {texts.translate('Runs')}", "", _runs_table(used, texts), ""]
        return "\n".join(lines)


def write_page(files: Sequence[Path], output: Path, languages: Sequence[Language] = ("en",)) -> list[Path]:
    """The page in each language (x.md, x.zh-CN.md) and its plots, which go beside it; the paths that were written."""
    check_libraries()
    if output.suffix != ".md":
        raise InvalidValueError(f"output={output} is Markdown; give it a name in .md", field="output")
    pages = {_page_path(output, language): read_texts(language) for language in languages}
    for page in pages:
        check_place(page)
    check_conflicts([("output", page) for page in pages], files)
    output.parent.mkdir(exist_ok=True)
    runs = sorted((run for file in files for run in read_runs(file)), key=lambda run: str(run.date))
    if not runs:
        raise InvalidValueError(f"{', '.join(map(str, files))}: no run is in there; measure with `comfy-tpu bench`")
    try:
        written = _format_pages(pages, runs, output)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidValueError(
            f"{', '.join(map(str, files))}: a run in there cannot be shown ({reason}); give files that "
            "`comfy-tpu bench --json` wrote"
        ) from error
    write_texts(written)
    return list(written)


def _format_pages(pages: Mapping[Path, PageTexts], runs: Sequence[Run], output: Path) -> dict[Path, str]:
    written = dict.fromkeys(pages, "")
    chapters = dict.fromkeys(map(Chapter.find, sorted(runs, key=lambda run: run.model.startswith(SMALL_MODEL))))
    runs_of = {chapter: [run for run in runs if Chapter.find(run) == chapter] for chapter in chapters}
    plots = {chapter: chapter.draw(own) for chapter, own in runs_of.items()}
    for page, texts in pages.items():
        parts = [chapter.format(own, output.stem, plots[chapter], texts) for chapter, own in runs_of.items()]
        written[page] = "\n".join([_head(page, pages), format_figures(texts.figures), *parts])
    for chapter, drawn in plots.items():
        written |= {output.with_name(chapter.plot_name(output.stem, shown)): plot for shown, plot in drawn.items()}
    return written


def _page_path(output: Path, language: Language) -> Path:
    return output if language == "en" else output.with_name(f"{output.stem}.{language}.md")


def _head(page: Path, pages: Mapping[Path, PageTexts]) -> str:
    """With links to the other pages, where there are any."""
    title, _, rest = pages[page].head.partition("\n")
    if len(pages) == 1:
        return f"{title}\n{rest}"
    names = [texts.name if path == page else f"[{texts.name}]({path.name})" for path, texts in pages.items()]
    return f"{title}\n\n{' · '.join(names)}\n{rest}"


def latest_rows(runs: Sequence[Run], part: str) -> Rows:
    """Everything at every size by the last run that measured it, or that failed to where none did. `runs` are in the
    order of their dates."""
    things = dict.fromkeys((row.what, row.size) for run in runs for row in run.find(part))
    found: Rows = []
    for what, size in things:
        tried = [(run, rows) for run in runs if (rows := run.find(part, what, size))]
        last, rows = ([one for one in tried if any(row.measured for row in one[1])] or tried)[-1]
        found += [(last, row) for row in rows]
    return found


def _machine_line(run: Run, texts: PageTexts) -> str:
    hardware = run.hardware
    memory = hardware.get("device_memory_bytes")
    parts = [
        f"{hardware['devices']} × {hardware['device']}" + (f" ({memory / 2**30:.0f} GiB)" if memory else ""),
        texts.translate("driver {driver}").format(driver=hardware["driver"]) if hardware.get("driver") else "",
        texts.translate("{processor}, {cores} cores, {memory}").format(
            processor=hardware["processor"],
            cores=hardware["processor_cores"],
            memory=f"{hardware['host_memory_bytes'] / 2**30:.0f} GiB",
        ),
    ]
    line = texts.translate("; ").join(filter(None, parts)) + texts.translate(".")
    return line + (texts.translate(_CPU_REMARK) if hardware["platform"] == "cpu" else "")


def _runs_table(runs: Sequence[Run], texts: PageTexts) -> str:
    lines = []
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
        lines.append([run.date.replace("T", " ").replace("+00:00", " UTC"), f"`{run.command}`", versions])
    titles = [texts.translate(title) for title in ("date", "command", "versions")]
    return render_table(titles, lines, padded=texts.is_english)
