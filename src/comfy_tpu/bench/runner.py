"""The parts of a run, each in a process of its own; the results written after every row."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.bench.job import (
    DEVICES,
    MACHINE,
    PEERS,
    SIZED_PARTS,
    SMALL_MODEL,
    SMALL_PEERS,
    VIRTUAL_DEVICES,
    Choices,
    Job,
)
from comfy_tpu.bench.results import Row, Run
from comfy_tpu.errors import ComfyTpuError, InvalidValueError

Say = Callable[[str], None]
Keep = Callable[[Run], None]

WORKER = "comfy_tpu.bench.worker"


class BenchError(ComfyTpuError):
    """The devices of the machine could not be started, so nothing can be measured."""


def run_bench(choices: Choices, *, say: Say, keep: Keep) -> Run:
    """Measures what was chosen. `keep` is given the run after every row, so that a run that is cut short is kept."""
    asked = Job(MACHINE, model=choices.model, mesh=choices.mesh, dtype=choices.dtype, sizes=choices.sizes)
    run, sizes = begin_run(dataclasses.replace(asked, parts=choices.parts), choices.command, say)
    keep(run)
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-bench-") as scratch:
        for job in jobs(choices, run, sizes):
            say(f"— {job.part} {job.size} {job.state if job.part == 'compile' else ''}".rstrip())
            if not job.candidates:
                say(f"  not measured: it has none of the chosen peers ({', '.join(job.peers)})")
                continue
            # The same for the cold and the warm process of a part, fresh for every other part.
            job = dataclasses.replace(job, cache_directory=str(Path(scratch) / f"{job.part}-{job.size}"))
            seen: dict[tuple[str, ...], Row] = {}
            for row in measured_rows(job, Path(scratch), say):
                run = run.with_row(row)
                keep(run)
                if row.key not in seen or row.failure:
                    say(f"  {row_line(row)}")
                seen[row.key] = row
            for row in seen.values():  # after all rounds
                if len(row.samples) > 1 and row.part != "ceilings":
                    say(f"  {row_line(row)}")
    return run


def jobs(choices: Choices, run: Run, sizes: Sequence[str]) -> list[Job]:
    is_small = run.model.startswith(SMALL_MODEL) or run.hardware["platform"] == "cpu"
    common = Job(
        part="",
        model=run.model,
        mesh=run.mesh,
        dtype=run.dtype,
        size=sizes[0],
        peers=choices.peers or (SMALL_PEERS if is_small else PEERS),
        repeats=choices.repeats,
        steps=choices.steps,
        regional=choices.regional,
    )
    made = []
    for part in choices.parts:
        for size in sizes if part in SIZED_PARTS else sizes[:1]:
            own = dataclasses.replace(common, part=part, size=size)
            made.append(own)
            if part == "compile":
                made.append(dataclasses.replace(own, state="warm"))
            if part == "scaling" and run.model.startswith(SMALL_MODEL):
                made.append(dataclasses.replace(own, part=DEVICES, mesh="single", dtype="float32"))
    return made


def begin_run(job: Job, command: str, say: Say) -> tuple[Run, list[str]]:
    """The run without rows, and the sizes to measure. Raises InvalidValueError for choices that cannot be measured."""
    say("looking at the machine")
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-bench-") as scratch:
        messages = list(_messages(dataclasses.replace(job, cache_directory=scratch), Path(scratch)))
    for message in messages:
        if "refused" in message:
            raise InvalidValueError(message["refused"], field=message["field"])
    facts = next((message["machine"] for message in messages if "machine" in message), None)
    if facts is None:
        reason = next((message["ended"] for message in messages if "ended" in message), "no message came")
        raise BenchError(f"the devices of this machine could not be started ({reason}); run `comfy-tpu doctor`")
    say(f"{facts['hardware']['device']}, {facts['model']}, {facts['dtype']}, mesh {facts['mesh']}")
    run = Run(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        model=facts["model"],
        dtype=facts["dtype"],
        hardware=facts["hardware"],
        versions=facts["versions"],
        mesh=facts["mesh"],
    )
    return run, facts["sizes"]


def measured_rows(job: Job, scratch: Path, say: Say, worker: str = WORKER) -> Iterator[Row]:
    """`worker`: the module that measures the part."""
    for message in _messages(job, scratch, worker):
        if "note" in message:
            say(f"  {message['note']}")
        if "row" in message:
            yield Row.from_json(message["row"])
        if "ended" in message:
            yield Row(job.part, "the part itself", "", size=job.size, failure=message["ended"])


def _messages(job: Job, scratch: Path, worker: str = WORKER) -> Iterator[dict[str, Any]]:
    """Messages of the process of a job. The last one is {"ended": reason} if the process failed."""
    job = dataclasses.replace(job, started=time.time())
    with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
        json.dump(job.to_json(), given)
        given.seek(0)
        with _process(worker, given, _environment(job, scratch, worker)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            if status := process.wait():
                yield {"ended": f"its process {_ending(status)}"}


@contextlib.contextmanager
def _process(worker: str, given: Any, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", worker]
    with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _environment(job: Job, scratch: Path, worker: str = WORKER) -> dict[str, str]:
    environment = dict(os.environ)
    roots = [_package_root(module) for module in dict.fromkeys((WORKER, worker))]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*roots, environment.get("PYTHONPATH")]))
    # jax would take three quarters of the GPU before torch has made its weights.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # torch.compile starts from nothing, as ours does; unless somebody points it elsewhere to save its 150 s in a
    # repeated run.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{job.cache_directory or scratch}-inductor")
    if job.part == DEVICES:
        count = max(VIRTUAL_DEVICES)
        environment["JAX_PLATFORMS"] = "cpu"
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        environment["XLA_FLAGS"] = flags.strip()
    # Threads that wait asleep: on a host that others use too, torch on a CPU is five times slower otherwise.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    return environment


def _package_root(module: str) -> str:
    """The directory to import the module's top package from."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(Path(next(iter(spec.submodule_search_locations))).parent)


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
