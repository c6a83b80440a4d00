"""A variant in a process of its own, from nothing to its videos; and all of them by turns, for the time of a decode."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from pathlib import Path
from typing import Any

from benchmarks.vae.choices import START, TURNS
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.results import Emit, Row


def measure_start(job: Job, emit: Emit) -> None:
    from benchmarks.vae import decoders
    from benchmarks.vae.inputs import Inputs, open_bench
    from comfy_tpu.bench.machine import relative_error
    from comfy_tpu.bench.timing import time_interleaved

    (variant,) = job.peers
    from diffusers import AutoencoderKLWan  # noqa: F401 - built by it or held against it, in every variant

    if variant.startswith("nnx"):
        import comfy_tpu.families.wan.nnx_vae.component  # noqa: F401 - counted as imported, as torch and jax are by now
    imported = time.time() - job.started
    load = os.getloadavg()[0]
    inputs, bench = Inputs.read(job), open_bench(job)
    row = Row(START, job.state, "", size=job.size)
    made: list[decoders.Decoder] = []

    def prepare() -> Any:
        made.append(decoders.prepare(variant, job, bench, inputs))
        return made[0].candidate

    measure_error = functools.partial(_measure_error, relative_error, inputs)
    done = time_interleaved(
        row, {variant: prepare}, repeats=job.repeats, emit=lambda message: None, measure_error=measure_error
    )[variant]
    facts = {"import_s": imported, **done.facts, "load_average": load, "peak_bytes": peak_bytes()}
    if done.first_s is not None:
        stages = sum(facts.get(name, 0.0) for name in ("trace_s", "lower_s", "compile_s"))
        facts["first_decode_s"] = done.first_s - stages
        facts["total_s"] = imported + facts["build_s"] + facts["load_s"] + done.first_s
    if job.state == "cold" and made and made[0].program is not None:
        texts = made[0].program.compiled_texts()
        facts |= {"hlo_bytes": sum(map(len, texts)), "hlo_instructions": sum(map(instructions, texts))}
    emit(dataclasses.replace(done, facts=facts))


def measure_turns(job: Job, emit: Emit) -> None:
    from benchmarks.vae import decoders
    from benchmarks.vae.inputs import Inputs, open_bench
    from comfy_tpu.bench.timing import time_interleaved

    inputs, bench = Inputs.read(job), open_bench(job)

    def preparing(variant: str) -> Any:
        return lambda: decoders.prepare(variant, job, bench, inputs).candidate

    row = Row(TURNS, "decode", "", size=job.size)
    rows = time_interleaved(row, {name: preparing(name) for name in job.peers}, repeats=job.repeats, emit=emit)
    load = os.getloadavg()[0]
    for done in rows.values():
        emit(dataclasses.replace(done, facts={"load_average": load}))


def peak_bytes() -> int | None:
    """What the process had in memory at most. Not getrusage's, which remembers the process that started this one."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def instructions(text: str) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE))


def _measure_error(relative_error: Any, inputs: Any, output: Any) -> float:
    error: float = relative_error(output.cpu(), inputs.expected)
    return error
