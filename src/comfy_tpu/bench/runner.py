"""The parts of a run, each in a process of its own; the results written after every row."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import comfy_tpu
from comfy_tpu.bench.job import DEVICES, MODELS, ON_A_CPU, PEERS, Choices, Job
from comfy_tpu.bench.results import Row, Run
from comfy_tpu.errors import ComfyTpuError

Say = Callable[[str], None]
Keep = Callable[[Run], None]

_SIZED = ("transformer", "accuracy", "vae", "compile", "end-to-end")
"""Parts that are measured once for every size."""


class BenchError(ComfyTpuError):
    """The machine could not be looked at, so nothing can be measured on it."""


def run_bench(choices: Choices, *, say: Say, keep: Keep) -> Run:
    """Measures what was chosen. `keep` is given the run after every row, so that a run that is cut short is there."""
    run = begin_run(choices, say)
    keep(run)
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-bench-") as scratch:
        for job in jobs(choices, run.model, run.dtype):
            say(f"— {job.part} {job.size} {job.state if job.part == 'compile' else ''}".rstrip())
            if not job.entrants:
                say(f"  not measured: it has none of the chosen peers ({', '.join(job.peers)})")
                continue
            # The same for the cold and the warm process of a part, fresh for everybody else.
            job = dataclasses.replace(job, cache_directory=str(Path(scratch) / f"{job.part}-{job.size}"))
            seen: dict[tuple[str, ...], Row] = {}
            for row in measured_rows(job, Path(scratch), say):
                run = run.with_row(row)
                keep(run)
                if row.key not in seen or row.failure:
                    say(f"  {row_line(row)}")
                seen[row.key] = row
            for row in seen.values():  # what the rounds made of the first impressions
                if len(row.samples) > 1 and row.part != "ceilings":
                    say(f"  {row_line(row)}")
    return run


def jobs(choices: Choices, model: str, dtype: str) -> list[Job]:
    sizes = [str(size) for size in (choices.sizes or MODELS[model].sizes)]
    peers = choices.peers or (PEERS if model == "full" else ON_A_CPU)
    common = Job(
        part="",
        model=model,
        dtype=dtype,
        size=sizes[0],
        peers=peers,
        repeats=choices.repeats,
        steps=choices.steps,
        regional=choices.regional,
    )
    made = []
    for part in choices.parts:
        for size in sizes if part in _SIZED else sizes[:1]:
            own = dataclasses.replace(common, part=part, size=size)
            made.append(own)
            if part == "compile":
                made.append(dataclasses.replace(own, state="warm"))
            if part == "scaling":
                made.append(dataclasses.replace(own, part=DEVICES, model="small", dtype="float32"))
    return made


class Asked(Protocol):
    """What every run is asked for."""

    @property
    def model(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def command(self) -> str: ...


def begin_run(choices: Asked, say: Say) -> Run:
    say("looking at the machine")
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-bench-") as scratch:
        messages = list(_messages(Job(part="machine"), Path(scratch)))
    facts = next((message["machine"] for message in messages if "machine" in message), None)
    if facts is None:
        said = next((message["ended"] for message in messages if "ended" in message), "it said nothing")
        raise BenchError(f"the devices of this machine could not be started ({said}); run `comfy-tpu doctor`")
    accelerated = facts["hardware"]["platform"] != "cpu"
    model = ("full" if accelerated else "small") if choices.model == "auto" else choices.model
    dtype = ("bfloat16" if accelerated else "float32") if choices.dtype == "auto" else choices.dtype
    say(f"{facts['hardware']['device']}, {model} model, {dtype}")
    return Run(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=choices.command,
        model=model,
        dtype=dtype,
        hardware=facts["hardware"],
        versions=facts["versions"],
    )


def measured_rows(job: Job, scratch: Path, say: Say) -> Iterator[Row]:
    for message in _messages(job, scratch):
        if "note" in message:
            say(f"  {message['note']}")
        if "row" in message:
            yield Row.from_json(message["row"])
        if "ended" in message:
            yield Row(job.part, "the part itself", "", size=job.size, failure=message["ended"])


def _messages(job: Job, scratch: Path) -> Iterator[dict[str, Any]]:
    """What the process of a job says. The last one is {"ended": why} if it did not end well."""
    job = dataclasses.replace(job, started=time.time())
    with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
        json.dump(job.to_json(), given)
        given.seek(0)
        with _process(given, _environment(job, scratch)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            if status := process.wait():
                yield {"ended": f"its process {_ending(status)}"}


@contextlib.contextmanager
def _process(given: Any, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "comfy_tpu.bench.worker"]
    with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _environment(job: Job, scratch: Path) -> dict[str, str]:
    environment = dict(os.environ)
    source = str(Path(comfy_tpu.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")]))
    # jax would take three quarters of the GPU before torch has made its weights.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # torch.compile starts from nothing, as ours does; unless somebody points it elsewhere to save its 150 s in a
    # repeated run.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{job.cache_directory or scratch}-inductor")
    if job.part == DEVICES:
        count = max(MODELS[job.model].scaling_devices)
        environment["JAX_PLATFORMS"] = "cpu"
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        environment["XLA_FLAGS"] = flags.strip()
    # Threads that wait asleep: on a host that others use too, torch on a CPU is five times slower otherwise.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    return environment


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}; for SIGKILL look at the host's memory"
    return f"exited with status {status}; its messages are above"


def row_line(row: Row) -> str:
    label = " ".join(filter(None, (row.what, row.size, row.peer)))
    if row.failure:
        return f"{label}: failed: {row.failure}"
    figures = []
    if row.median_s is not None and row.spread_s is not None:
        figures.append(f"{row.median_s:.4g} s ({row.spread_s[0]:.4g} to {row.spread_s[1]:.4g}, n={len(row.samples)})")
    if row.tflops:
        figures.append(f"{row.tflops:.4g} TFLOP/s")
    if row.first_s is not None:
        figures.append(f"first call {row.first_s:.3g} s")
    if row.error is not None:
        figures.append(f"error {row.error:.2e}")
    return f"{label}: {', '.join(figures)}"
