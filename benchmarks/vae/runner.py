"""Every variant cold and warm in fresh processes, then all of them by turns in one, with the programs they left."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.vae.choices import INPUTS, START, TURNS, UNLESS_ASKED_FOR, VARIANTS, VaeChoices
from comfy_tpu.bench.job import SMALL_MODEL, Job
from comfy_tpu.bench.results import Run
from comfy_tpu.bench.runner import Keep, Parts, Say, begin_run, format_row, measure_rows

PARTS: Parts = {
    INPUTS: ("benchmarks.vae.inputs", "make_inputs"),
    START: ("benchmarks.vae.start", "measure_start"),
    TURNS: ("benchmarks.vae.start", "measure_turns"),
}

_LATER = 2
"""Decodes behind the first in a process of its own. They are compared by turns."""


def run_comparison(choices: VaeChoices, *, say: Say, keep: Keep) -> Run:
    run, _ = begin_run(Job(model=SMALL_MODEL, dtype=choices.dtype, parts=()), choices.command, say)
    run = dataclasses.replace(run, model=choices.model)
    variants = choices.variants or tuple(
        name for name in VARIANTS if run.hardware["platform"] != "cpu" or name not in UNLESS_ASKED_FOR
    )
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-bench-") as scratch:
        for job in _jobs(choices, run, variants, Path(scratch)):
            say(f"— {job.part} {' '.join(job.peers) if job.part == START else ''} {job.state}")
            for row in measure_rows(job, say, PARTS):
                run = run.with_row(row)
                keep(run)
                if job.part == START or row.failure or len(row.samples) == job.repeats:
                    say(f"  {format_row(row)}")
    return run


def _jobs(choices: VaeChoices, run: Run, variants: tuple[str, ...], scratch: Path) -> Iterator[Job]:
    shared = scratch / "programs"
    common = Job(
        part=INPUTS,
        model=run.model,
        dtype=run.dtype,
        size=str(choices.size),
        repeats=choices.repeats,
        inputs=str(scratch / "inputs"),
        peers=variants,
        cache_directory=str(shared),
    )
    yield common
    for variant in variants:
        directory = str(scratch / variant)
        own = dataclasses.replace(common, part=START, peers=(variant,), cache_directory=directory, repeats=_LATER)
        yield own
        yield dataclasses.replace(own, state="warm")
        for kind in ("", "-inductor"):
            left = Path(own.cache_directory + kind)
            if left.is_dir():
                shutil.copytree(left, f"{shared}{kind}", dirs_exist_ok=True)
    yield dataclasses.replace(common, part=TURNS, state="warm")
