"""The parts of a run, each in a process of its own, which needs a clean device and its own XLA settings."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.bench.job import DEVICES, MACHINE, PEERS, SIZED_PARTS, SMALL_MODEL, SMALL_PEERS, VIRTUAL_DEVICES, Job
from comfy_tpu.bench.results import Row, Run
from comfy_tpu.errors import ComfyTpuError, InvalidValueError

Say = Callable[[str], None]
Keep = Callable[[Run], None]

Parts = Mapping[str, tuple[str, str]]
"""Part -> module and function that measure it. Imported in the part's process only: a compilation for eight CPU devices
needs other flags than a forward on a GPU."""
PARTS: Parts = {
    "transformer": ("comfy_tpu.bench.transformer", "measure_transformer"),
    "accuracy": ("comfy_tpu.bench.transformer", "measure_accuracy"),
    "vae": ("comfy_tpu.bench.vae", "measure_vae"),
    "text": ("comfy_tpu.bench.text", "measure_text"),
    "end-to-end": ("comfy_tpu.bench.end_to_end", "measure_end_to_end"),
    "scaling": ("comfy_tpu.bench.transformer", "measure_tokens"),
    DEVICES: ("comfy_tpu.bench.transformer", "measure_devices"),
    "compile": ("comfy_tpu.bench.compilation", "measure_compilation"),
}


class BenchError(ComfyTpuError):
    """The devices of the machine could not be started, so nothing can be measured."""


def run_bench(request: Job, *, say: Say, keep: Keep) -> Run:
    """Measures what is asked for. `keep` is given the run after every row, so that a run that is cut short is kept."""
    run, sizes = begin_run(request, request.command, say)
    keep(run)
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-bench-") as scratch:
        for job in list_jobs(request, run, sizes):
            say(f"— {job.part} {job.size} {job.state if job.part == 'compile' else ''}".rstrip())
            if not job.candidates:
                say(f"  not measured: it has none of the chosen peers ({', '.join(job.peers)})")
                continue
            # The same for the cold and the warm process of a part, fresh for every other part.
            job = dataclasses.replace(job, cache_directory=str(Path(scratch) / f"{job.part}-{job.size}"))
            seen: dict[tuple[str, ...], Row] = {}
            for row in measure_rows(job, say):
                run = run.with_row(row)
                keep(run)
                if row.key not in seen or row.failure:
                    say(f"  {format_row(row)}")
                seen[row.key] = row
            for row in seen.values():  # after all rounds
                if len(row.samples) > 1 and row.part != "ceilings":
                    say(f"  {format_row(row)}")
    return run


def list_jobs(request: Job, run: Run, sizes: Sequence[str]) -> list[Job]:
    is_small = run.model.startswith(SMALL_MODEL)
    peers = request.peers or (SMALL_PEERS if is_small or run.hardware["platform"] == "cpu" else PEERS)
    common = dataclasses.replace(request, model=run.model, mesh=run.mesh, dtype=run.dtype)
    jobs = []
    for part in request.parts:
        for size in sizes if part in SIZED_PARTS else sizes[:1]:
            job = dataclasses.replace(common, part=part, size=size, peers=peers)
            jobs.append(job)
            if part == "compile":
                jobs.append(dataclasses.replace(job, state="warm"))
            if part == "scaling" and is_small:
                jobs.append(dataclasses.replace(job, part=DEVICES, mesh="single", dtype="float32"))
    return jobs


def begin_run(request: Job, command: str, say: Say) -> tuple[Run, list[str]]:
    """The run without rows, and the sizes to measure. Raises InvalidValueError for what cannot be measured."""
    say("looking at the machine")
    answer = [*_receive(request, PARTS)][-1]
    if isinstance(answer, Row):
        reason = answer.failure
        raise BenchError(f"the devices of this machine could not be started ({reason}); run `comfy-tpu doctor`")
    if "refused" in answer:
        raise InvalidValueError(answer["refused"], field=answer["field"])
    sizes, facts = answer["sizes"], answer["run"]
    say(f"{facts['hardware']['device']}, {facts['model']}, {facts['dtype']}, mesh {facts['mesh']}")
    return Run(datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command, **facts), sizes


def measure_rows(job: Job, say: Say, parts: Parts = PARTS) -> Iterator[Row]:
    for message in _receive(job, parts):
        if isinstance(message, Row):
            yield message
        else:
            say(f"  {message}")


def _receive(job: Job, parts: Parts) -> Iterator[Any]:
    """What the process of a job emits, and a row with the reason where it fails. It is spawned: threads of jax and
    torch do not survive a fork."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    job = dataclasses.replace(job, started=time.time())
    process = context.Process(target=_run_process, args=(job, parts, sender, _environment(job)))
    process.start()
    sender.close()
    try:
        with receiver, contextlib.suppress(EOFError):
            while True:
                yield receiver.recv()
        process.join()
        if process.exitcode:
            failure = f"its process {_describe_exit(process.exitcode)}"
            yield Row(job.part, "the part itself", "", size=job.size, failure=failure)
    finally:
        process.kill()
        process.join()


def _run_process(job: Job, parts: Parts, sender: Any, environment: Mapping[str, str]) -> None:
    """All that the process of a part does."""
    os.environ.update(environment)  # before jax and torch are imported
    os.dup2(2, 1)  # libraries print to the standard output, where the tables go
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("comfy_tpu.parallel.mesh").setLevel(logging.ERROR)  # the run says itself, once, what it runs on
    run_part(job, sender.send, parts)


def run_part(job: Job, emit: Callable[[Any], None], parts: Parts = PARTS) -> None:
    """Measures a part. Of the first process of a run, emits its facts, or why it is refused."""
    try:
        if job.part == MACHINE:
            from comfy_tpu.bench.machine import plan_run

            emit(plan_run(job))
        else:
            module, function = parts[job.part]
            getattr(importlib.import_module(module), function)(job, emit)
    except Exception as error:  # noqa: BLE001 - what happened goes into the results
        if job.part == MACHINE and isinstance(error, ComfyTpuError):
            emit({"refused": str(error), "field": error.field})
        else:
            emit(Row(job.part, "the part itself", "", size=job.size).with_failure(error))


def _environment(job: Job) -> dict[str, str]:
    """Variables that the process of a part has besides those of this one."""
    # Unset, jax would take three quarters of the GPU before torch has made its weights.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TOKENIZERS_PARALLELISM": "false"}
    # Threads that wait asleep: on a host that others use too, torch on a CPU is five times slower otherwise.
    environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    if job.cache_directory and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # torch.compile starts from nothing, as ours does; unless somebody points it elsewhere to save its 150 s in a
        # repeated run.
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{job.cache_directory}-inductor"
    if job.part == DEVICES:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(VIRTUAL_DEVICES)}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    return environment


def _describe_exit(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}; for SIGKILL look at the host's memory"
    return f"exited with status {status}; its messages are above"


def format_row(row: Row) -> str:
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
