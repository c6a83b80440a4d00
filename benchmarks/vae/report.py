"""Tables and plots of `python -m benchmarks.vae`, in the languages of the pages that show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.vae.choices import START, TURNS, VARIANTS
from comfy_tpu.bench.plots import Bar, draw_bars
from comfy_tpu.bench.report import write_texts
from comfy_tpu.bench.results import Row, Run
from comfy_tpu.bench.tables import format_seconds, render_table
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.atomic import check_place
from comfy_tpu.pipeline.path_conflicts import check_conflicts

Language = Literal["en", "zh-CN"]
Cell = Callable[[Row], str]


def _fact(name: str, write: Callable[[Any], str] = format_seconds) -> Cell:
    return lambda row: write(row.facts[name]) if row.facts.get(name) is not None else ""


def _median(row: Row) -> str:
    return format_seconds(row.median_s) if row.median_s is not None else row.failure or ""


def _spread(row: Row) -> str:
    return f"{format_seconds(row.spread_s[0])} – {format_seconds(row.spread_s[1])}" if row.spread_s else ""


_STAGES: Mapping[str, tuple[str, Cell]] = {
    "import": ("导入", _fact("import_s")),
    "build": ("构建", _fact("build_s")),
    "load": ("加载", _fact("load_s")),
    "trace": ("追踪", _fact("trace_s")),
    "lower": ("降级", _fact("lower_s")),
    "compile": ("编译", _fact("compile_s")),
    "first decode": ("首次解码", _fact("first_decode_s")),
    "all of it": ("合计", _fact("total_s")),
    "peak memory": ("内存峰值", _fact("peak_bytes", lambda value: f"{value / 2**30:.2f} GiB")),
    "load of the machine": ("机器负载", _fact("load_average", lambda value: f"{value:.1f}")),
    "not measured": ("未测", lambda row: (row.failure or "")[:120]),
}
_PROGRAMS: Mapping[str, tuple[str, Cell]] = {
    "programs": ("程序数", _fact("programs", str)),
    "HLO instructions": ("HLO 指令数", _fact("hlo_instructions", lambda value: f"{value:,}")),
    "HLO text": ("HLO 文本", _fact("hlo_bytes", lambda value: f"{value / 2**20:.2f} MiB")),
    "error": ("误差", lambda row: "" if row.error is None else f"{row.error:.1e}"),
}
_DECODES: Mapping[str, tuple[str, Cell]] = {
    "median": ("中位数", _median),
    "min – max": ("最小 – 最大", _spread),
    "n": ("次数", lambda row: str(len(row.samples))),
    "load of the machine": ("机器负载", _fact("load_average", lambda value: f"{value:.1f}")),
}
_TITLES: Sequence[tuple[str, str, str, str, Mapping[str, tuple[str, Cell]]]] = (
    (START, "cold", "From nothing, with an empty cache", "从零开始，缓存为空", _STAGES),
    (START, "warm", "In a new process, with the cache it left", "新进程，使用留下的缓存", _STAGES),
    (START, "cold", "Programs, and error against float32 PyTorch", "程序，以及相对 float32 PyTorch 的误差", _PROGRAMS),
    (TURNS, "decode", "Decoding by turns in one process", "同一进程内轮流解码", _DECODES),
)


def tables(run: Run, language: Language = "en", heading: str = "###") -> str:
    """A column that nothing fills is left out."""
    lines = [_machine(run, language), ""]
    for part, what, english, chinese, columns in _TITLES:
        found = {row.peer: row for row in run.find(part, what=what)}
        rows = [found[name] for name in VARIANTS if name in found]
        if rows:
            lines += [f"{heading} {english if language == 'en' else chinese}", "", _table(rows, columns, language), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row], columns: Mapping[str, tuple[str, Cell]], language: Language) -> str:
    cells = {
        (title if language == "en" else chinese): [cell(row) for row in rows]
        for title, (chinese, cell) in columns.items()
    }
    filled = {title: column for title, column in cells.items() if any(column)}
    names = [VARIANTS[row.peer] for row in rows]
    first = "variant" if language == "en" else "方式"
    return render_table([first, *filled], [list(line) for line in zip(names, *filled.values(), strict=True)])


def _machine(run: Run, language: Language) -> str:
    hardware, size = run.hardware, next((row.size for row in run.rows), "")
    count = hardware["processor_cores"]
    cores = "核" if language != "en" else "core" if count == 1 else "cores"
    where = f"{hardware['devices']} × {hardware['device']} ({hardware['processor']}, {count} {cores})"
    versions = ", ".join(
        f"{name} {run.versions[name]}"
        for name in ("jax", "torch", "torchax", "flax", "diffusers")
        if run.versions.get(name)
    )
    date = run.date.replace("T", " ").replace("+00:00", " UTC")
    if language == "en":
        return f"{where}, {run.model} model, {run.dtype}, {size}; {versions}; {date}; `{run.command}`."
    return f"{where}，{run.model} 模型，{run.dtype}，{size}；{versions}；{date}；`{run.command}`。"


def plots(run: Run) -> dict[str, str]:
    """By the ending of their names."""
    cold = [
        Bar(VARIANTS[row.peer], total, total, total, index)
        for index, row in enumerate(_in_order(run, START, "cold"))
        if (total := row.facts.get("total_s")) is not None
    ]
    warm = [
        Bar(f"{VARIANTS[row.peer]}, from the cache", total, total, total, index)
        for index, row in enumerate(_in_order(run, START, "warm"))
        if (total := row.facts.get("total_s")) is not None
    ]
    decodes = [
        Bar(VARIANTS[row.peer], row.median_s, *row.spread_s, index)
        for index, row in enumerate(_in_order(run, TURNS, "decode"))
        if row.median_s is not None and row.spread_s is not None
    ]
    return {
        "start": draw_bars("From nothing to the first video: seconds, less is better", [*cold, *warm]),
        "decode": draw_bars("A decode, by turns: seconds, less is better", decodes),
    }


def _in_order(run: Run, part: str, what: str) -> list[Row]:
    found = {row.peer: row for row in run.find(part, what=what)}
    return [found[name] for name in VARIANTS if name in found]


def check_output(path: Path, json: Path | None = None) -> None:
    """`json`: where the samples go."""
    if path.suffix != ".md":
        raise InvalidValueError(f"output={path} is Markdown; give it a name in .md", field="output")
    check_place(path)
    check_conflicts([*([] if json is None else [("json", json)]), ("output", path)])


def write_output(path: Path, run: Run) -> None:
    """The tables, and the plots beside them."""
    drawn = plots(run)
    images = [f"![{ending}]({path.stem}-{ending}.svg)" for ending in drawn]
    texts = {
        path: "\n\n".join(["# The Wan VAE, by torchax, Flax NNX and diffusers", *images, tables(run, heading="##")])
    }
    texts |= {path.with_name(f"{path.stem}-{ending}.svg"): text for ending, text in drawn.items()}
    write_texts(texts)
