"""The files of a run (JSON while it goes on, tables and a plot at its end), and docs/performance.md, which is made from
the JSON of runs alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from comfy_tpu.bench.job import SMALL_MODEL
from comfy_tpu.bench.plots import Bar, check_libraries, draw_bars, draw_scaling, exponent_table
from comfy_tpu.bench.reported import format_figures
from comfy_tpu.bench.results import Row, Run, read_runs, write_runs
from comfy_tpu.bench.tables import PEER_NAMES, TITLES, make_table, peer_name, render_table
from comfy_tpu.bench.words import Language, translate
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import family_cards
from comfy_tpu.pipeline.atomic import check_place, replacing, write_errors
from comfy_tpu.pipeline.path_conflicts import check_conflicts

Rows = list[tuple[Run, Row]]
"""Rows, each with the run that it is compared within."""

_CPU_REMARK = " A CPU shows that everything runs and what it costs to start; speed is measured on accelerators."
_COMPARED = ("transformer", "vae", "text", "end-to-end")
"""Parts whose peers compute the same."""

_HEADS: Mapping[Language, str] = {
    "en": """# Performance

Made by `comfy-tpu bench report` from the JSON files of `comfy-tpu bench`; change the measurements, not this page.

Seconds are wall time with the device waited for: medians of the samples after a warm-up call, smallest and largest
beside them. Peers of a row run in one process with the same weights, in turns; "ours is faster" compares within that
run only, and so does "fp8 is faster", with ours that is not quantized. Weights are random. TFLOP/s count products,
convolutions and attention; "of the floor" is how near a forward comes to one whose products and attention each run at
the best rate measured beside it (of 8-bit products none is). The error is the norm of the difference from a
float32 reference over the norm of the reference; the transformer's is that of two of its blocks at their full width,
because a float32 copy of a large model does not fit beside the others.
""",
    "zh-CN": """# 性能

由 `comfy-tpu bench report` 根据 `comfy-tpu bench` 的 JSON 文件生成；要改的是测量结果，不是本页。

时间是墙钟时间，等设备算完才停表：预热一次之后各样本的中位数，旁边是最小值和最大值。同一行的各个实现在同一个进程里用同样的权重
轮流运行；“我们快”只在同一次运行之内比较，“fp8 快”也是，比的是我们自己未量化的版本。权重是随机的。TFLOP/s 计入矩阵乘、卷积和注意力；
“达到下限的”指一次前向与下限的接近程度，下限是其中的矩阵乘和注意力都以旁边测得的最高速率运行所需的时间（8 位乘法没有这样的参照）。
误差是与 float32 参考结果之差的范数除以参考结果的范数；transformer 的误差取两个完整宽度的 block，因为大模型的 float32 副本放不下。
“项目”和“实现”两列沿用 JSON 里的名字。
""",
}
_TWIN_LINKS: Mapping[Language, str] = {
    "en": "English · [简体中文]({twin})",
    "zh-CN": "[English]({twin}) · 简体中文",
}
"""Under the title of a page that was made in both languages."""


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
        return self.translated_title("en")

    def translated_title(self, language: Language) -> str:
        kind, _, family = self.model.partition(":")
        titles = {card.name: card.title for card in family_cards()}
        small = translate("a small {family}", language).format(family=titles.get(family, family))
        model = small if kind == SMALL_MODEL else self.model.rpartition("/")[2]
        mesh = self.mesh and translate("mesh {mesh}", language).format(mesh=self.mesh)
        return translate(", ", language).join(filter(None, [self.device, model, self.dtype, mesh]))

    @property
    def slug(self) -> str:
        words = f"{self.device} {self.model.rpartition('/')[2]} {self.dtype} {self.mesh}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")

    def format(self, runs: Sequence[Run], stem: str, language: Language = "en") -> tuple[str, dict[str, str]]:
        """The text, and its plots by file name, whose words are English. `stem`: of the page's name."""
        lines, plots = [f"## {self.translated_title(language)}", "", _machine_line(runs[-1], language), ""], {}
        found = {part: latest_rows(runs, part) for part in TITLES}
        if any(row.samples for part in found for _, row in found[part] if part != "scaling"):
            name = f"{stem}-{self.slug}.svg"
            plots[name] = draw_peers(self.title, [one for rows in found.values() for one in rows])
            lines += [f"![{translate('seconds by peer', language)}]({name})", ""]
        for part, title in TITLES.items():
            if found[part]:
                lines += [f"### {translate(title, language)}", "", make_table(found[part], language), ""]
        forwards = [*found["scaling"], *found["transformer"]]
        for against, text in draw_scaling(forwards).items():
            name = f"{stem}-{self.slug}-{against}.svg"
            plots[name] = text
            shown = translate("cost against {against}", language).format(against=translate(against, language))
            lines += [f"![{shown}]({name})", ""]
        if table := exponent_table(forwards, language):
            lines += [table, ""]
        used = [run for run in runs if any(run is one for rows in found.values() for one, _ in rows)]
        lines += [f"### {translate('Runs', language)}", "", _runs_table(used, language), ""]
        return "\n".join(lines), plots


def write_page(files: Sequence[Path], output: Path, languages: Sequence[Language] = ("en",)) -> list[Path]:
    """The page in each language (x.md, x.zh-CN.md) and its plots, which go beside it; the paths that were written."""
    check_libraries()
    if output.suffix != ".md":
        raise InvalidValueError(f"output={output} is Markdown; give it a name in .md", field="output")
    pages = {language: _page_path(output, language) for language in languages}
    for page in pages.values():
        check_place(page)
    check_conflicts([("output", page) for page in pages.values()], files)
    output.parent.mkdir(exist_ok=True)
    runs = sorted((run for file in files for run in read_runs(file)), key=lambda run: run.date)
    if not runs:
        raise InvalidValueError(f"{', '.join(map(str, files))}: no run is in there; measure with `comfy-tpu bench`")
    texts = dict.fromkeys(pages.values(), "")
    chapters = dict.fromkeys(map(Chapter.find, sorted(runs, key=lambda run: run.model.startswith(SMALL_MODEL))))
    for language, page in pages.items():
        twins = [other.name for other in pages.values() if other != page]
        text = [_head(language, twins), format_figures(language)]
        for chapter in chapters:
            own = [run for run in runs if Chapter.find(run) == chapter]
            written, plots = chapter.format(own, output.stem, language)
            text.append(written)
            texts |= {output.with_name(name): plot for name, plot in plots.items()}
        texts[page] = "\n".join(text)
    write_texts(texts)
    return list(texts)


def _page_path(output: Path, language: Language) -> Path:
    return output if language == "en" else output.with_name(f"{output.stem}.{language}.md")


def _head(language: Language, twins: Sequence[str]) -> str:
    title, _, rest = _HEADS[language].partition("\n")
    return "\n".join([title, *(f"\n{_TWIN_LINKS[language].format(twin=twin)}" for twin in twins), rest])


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


def _machine_line(run: Run, language: Language) -> str:
    hardware = run.hardware
    memory = hardware.get("device_memory_bytes")
    parts = [
        f"{hardware['devices']} × {hardware['device']}" + (f" ({memory / 2**30:.0f} GiB)" if memory else ""),
        translate("driver {driver}", language).format(driver=hardware["driver"]) if hardware.get("driver") else "",
        translate("{processor}, {cores} cores, {memory}", language).format(
            processor=hardware["processor"],
            cores=hardware["processor_cores"],
            memory=f"{hardware['host_memory_bytes'] / 2**30:.0f} GiB",
        ),
    ]
    line = translate("; ", language).join(filter(None, parts)) + translate(".", language)
    return line + (translate(_CPU_REMARK, language) if hardware["platform"] == "cpu" else "")


def _runs_table(runs: Sequence[Run], language: Language) -> str:
    lines = []
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
        lines.append([run.date.replace("T", " ").replace("+00:00", " UTC"), f"`{run.command}`", versions])
    titles = [translate(title, language) for title in ("date", "command", "versions")]
    return render_table(titles, lines, padded=language == "en")
