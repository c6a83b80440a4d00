"""docs/performance.md from the JSON of runs. Nothing on the page is written by hand."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from comfy_tpu.bench import slopes
from comfy_tpu.bench.markdown import TITLES, render, table_of
from comfy_tpu.bench.outputs import plot_of
from comfy_tpu.bench.results import Row, Run, read_runs
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.atomic import check_place, explained, replacing
from comfy_tpu.pipeline.path_conflicts import check_conflicts

Found = list[tuple[Run, Row]]

_HEAD = """# Performance

Made by `comfy-tpu bench report` from the JSON files of `comfy-tpu bench`; change the measurements, not this page.

Seconds are wall time with the device waited for: medians of the samples after a warm-up call, smallest and largest
beside them. Peers of a row run in one process with the same weights, in turns; "ours is faster" compares within that
run only, and so does "fp8 is faster", with ours that is not quantized. Weights are random. TFLOP/s count products,
convolutions and attention; "of the floor" is how near a forward comes to one whose products and attention each run at
the best rate measured beside it (of 8-bit products none is). The error is the norm of the difference from a
float32 reference over the norm of the reference; the transformer's is that of two of its blocks at their full width,
because a float32 copy of the 14B does not fit beside the others.
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Runs of one kind of device with one model: the figures of one chapter."""

    device: str
    model: str
    dtype: str

    @classmethod
    def of(cls, run: Run) -> Machine:
        return cls(str(run.hardware["device"]), run.model, run.dtype)

    @property
    def title(self) -> str:
        model = {"full": "Wan 2.1 14B", "small": "a small model"}.get(self.model, self.model)
        return f"{self.device}, {model}, {self.dtype}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.device} {self.model} {self.dtype}".lower()).strip("-")


def write_page(files: Sequence[Path], output: Path) -> list[Path]:
    """The page and its plots, which go beside it; the paths that were written."""
    if output.suffix != ".md":
        raise InvalidValueError(f"output={output} is Markdown; give it a name in .md")
    check_place(output)
    check_conflicts([("output", output)], files)
    output.parent.mkdir(exist_ok=True)
    runs = sorted((run for file in files for run in read_runs(file)), key=lambda run: run.date)
    if not runs:
        raise InvalidValueError(f"{', '.join(map(str, files))}: no run is in there; measure with `comfy-tpu bench`")
    texts = {output: ""}
    chapters = [_HEAD]
    for machine in dict.fromkeys(map(Machine.of, sorted(runs, key=lambda run: run.model))):  # the full model first
        own = [run for run in runs if Machine.of(run) == machine]
        chapter, plots = _chapter(machine, own, output.stem)
        chapters.append(chapter)
        texts |= {output.with_name(name): text for name, text in plots.items()}
    texts[output] = "\n".join(chapters)
    for path, text in texts.items():
        with replacing(path) as partial, explained(path):
            partial.write_text(text, encoding="utf-8")
    return list(texts)


def latest(runs: Sequence[Run], part: str) -> Found:
    """Everything at every size by the last run that measured it, or that failed to where none did. `runs` are in the
    order of their dates."""
    things = dict.fromkeys((row.what, row.size) for run in runs for row in run.find(part))
    found: Found = []
    for what, size in things:
        tried = [run for run in runs if run.find(part, what=what, size=size)]
        measured = [run for run in tried if any(row.measured for row in run.find(part, what=what, size=size))]
        last = (measured or tried)[-1]
        found += [(last, row) for row in last.find(part, what=what, size=size)]
    return found


def _chapter(machine: Machine, runs: Sequence[Run], stem: str) -> tuple[str, dict[str, str]]:
    lines = [f"## {machine.title}", "", _machine_line(runs[-1]), ""]
    plots = {}
    found = {part: latest(runs, part) for part in TITLES}
    if any(row.samples for part in found for _, row in found[part] if part != "scaling"):
        name = f"{stem}-{machine.slug}.svg"
        plots[name] = plot_of(machine.title, [one for rows in found.values() for one in rows])
        lines += [f"![seconds by peer]({name})", ""]
    for part, title in TITLES.items():
        if found[part]:
            lines += [f"### {title}", "", table_of(found[part]), ""]
    grown = [*found["scaling"], *found["transformer"]]
    for against, text in slopes.plots(grown).items():
        name = f"{stem}-{machine.slug}-{against}.svg"
        plots[name] = text
        lines += [f"![cost against {against}]({name})", ""]
    if table := slopes.exponents(grown):
        lines += [table, ""]
    used = [run for run in runs if any(run is one for rows in found.values() for one, _ in rows)]
    lines += ["### Runs", "", _runs(used), ""]
    return "\n".join(lines), plots


def _machine_line(run: Run) -> str:
    hardware = run.hardware
    memory = hardware.get("device_memory_bytes")
    parts = [
        f"{hardware['devices']} × {hardware['device']}" + (f" ({memory / 2**30:.0f} GiB)" if memory else ""),
        f"driver {hardware['driver']}" if hardware.get("driver") else "",
        f"{hardware['processor']}, {hardware['processor_cores']} cores, "
        f"{hardware['host_memory_bytes'] / 2**30:.0f} GiB",
    ]
    line = "; ".join(filter(None, parts)) + "."
    if hardware["platform"] == "cpu":
        line += " A CPU shows that everything runs and what it costs to start; speed is measured on accelerators."
    return line


def _runs(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
        lines.append([run.date.replace("T", " ").replace("+00:00", " UTC"), f"`{run.command}`", versions])
    return render(["date", "command", "versions"], lines)
