"""docs/performance.md, made from the JSON of runs alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from comfy_tpu.bench import slopes
from comfy_tpu.bench.job import SMALL_MODEL
from comfy_tpu.bench.outputs import draw_peers
from comfy_tpu.bench.plots import check_libraries
from comfy_tpu.bench.results import Row, Run, read_runs
from comfy_tpu.bench.tables import TITLES, make_table, render
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import family_cards
from comfy_tpu.pipeline.atomic import check_place, replacing, write_errors
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
because a float32 copy of a large model does not fit beside the others.
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Runs of one kind of device with one model and mesh: the figures of one chapter."""

    device: str
    model: str
    dtype: str
    mesh: str

    @classmethod
    def of(cls, run: Run) -> Machine:
        first = family_cards()[0]
        renamed = {"full": first.node_sets[0].hub_models[0], SMALL_MODEL: f"{SMALL_MODEL}:{first.name}"}
        return cls(str(run.hardware["device"]), renamed.get(run.model, run.model), run.dtype, run.mesh)

    @property
    def title(self) -> str:
        kind, _, family = self.model.partition(":")
        titles = {card.name: card.title for card in family_cards()}
        model = f"a small {titles.get(family, family)}" if kind == SMALL_MODEL else self.model.rpartition("/")[2]
        return ", ".join([self.device, model, self.dtype, *([] if self.mesh == Run.mesh else [f"mesh {self.mesh}"])])

    @property
    def slug(self) -> str:
        mesh = "" if self.mesh == Run.mesh else self.mesh
        words = f"{self.device} {self.model.rpartition('/')[2]} {self.dtype} {mesh}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def write_page(files: Sequence[Path], output: Path) -> list[Path]:
    """The page and its plots, which go beside it; the paths that were written."""
    check_libraries()
    if output.suffix != ".md":
        raise InvalidValueError(f"output={output} is Markdown; give it a name in .md", field="output")
    check_place(output)
    check_conflicts([("output", output)], files)
    output.parent.mkdir(exist_ok=True)
    runs = sorted((run for file in files for run in read_runs(file)), key=lambda run: run.date)
    if not runs:
        raise InvalidValueError(f"{', '.join(map(str, files))}: no run is in there; measure with `comfy-tpu bench`")
    texts = {output: ""}
    chapters = [_HEAD]
    for machine in dict.fromkeys(map(Machine.of, sorted(runs, key=_is_small))):
        own = [run for run in runs if Machine.of(run) == machine]
        chapter, plots = _chapter(machine, own, output.stem)
        chapters.append(chapter)
        texts |= {output.with_name(name): text for name, text in plots.items()}
    texts[output] = "\n".join(chapters)
    for path, text in texts.items():
        with replacing(path) as partial, write_errors(path):
            partial.write_text(text, encoding="utf-8")
    return list(texts)


def _is_small(run: Run) -> bool:
    return run.model.startswith(SMALL_MODEL)


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
        plots[name] = draw_peers(machine.title, [one for rows in found.values() for one in rows])
        lines += [f"![seconds by peer]({name})", ""]
    for part, title in TITLES.items():
        if found[part]:
            lines += [f"### {title}", "", make_table(found[part]), ""]
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
