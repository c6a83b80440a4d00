"""Runs the worker on a program, and counts what is in the result."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import comfy_tpu
from comfy_tpu.config import MeshSizes
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import ComfyTpuError, UnsupportedError
from comfy_tpu.parallel.chips import Slice
from comfy_tpu.parallel.traffic import UNEXPLAINED, Traffic
from comfy_tpu.planning.causes import explain_traffic
from comfy_tpu.planning.hlo import Module
from comfy_tpu.planning.program import ProgramFacts, StepProgram, square_arrays
from comfy_tpu.planning.schedule import StepSchedule, read_step
from comfy_tpu.planning.schedule_files import ScheduleError

# HunyuanVideo-1.5 at 720p took over half an hour on two cores that others used, too.
_TIMEOUT = 3600
_REASON_CHARACTERS_MAX = 1000

SCHEDULE_DIRECTORY = "schedule"
"""Where libtpu writes schedules, in the worker's directory."""

Mode = Literal["partition", "compile"]


class CompilationError(ComfyTpuError):
    """A compiler refused a program, or could not be run."""


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """The operations, traffic and memory of a compiled program: one step on one device."""

    source: Mode
    traffic: tuple[Traffic, ...]
    product_flops: float | None
    """None: the TPU compiler's text has no products left to count."""
    kernel_flops: float
    kernels: int
    square_arrays: tuple[str, ...]
    seconds: float
    """Duration of the compilation."""
    memory: Mapping[str, int] | None = None
    """Bytes by the compiler's own names."""
    cost: Mapping[str, float] | None = None
    """The compiler's cost analysis, which counts the body of a loop once."""
    compiler: str | None = None
    """Name and version of the TPU compiler."""
    schedule: StepSchedule | None = None
    schedule_refused: str | None = None
    """Why there is no schedule though one was asked for."""

    @property
    def sent_bytes(self) -> int:
        return sum(traffic.nbytes for traffic in self.traffic)

    @property
    def unexplained(self) -> tuple[Traffic, ...]:
        return tuple(traffic for traffic in self.traffic if traffic.cause == UNEXPLAINED)

    def peak_bytes(self, facts: ProgramFacts) -> int | None:
        """Peak memory, with the weights and latents that stay on the device though this program does not read them."""
        if self.memory is None:
            return None
        own = sum(self.memory[f"{part}_size_in_bytes"] for part in ("argument", "output", "temp", "generated_code"))
        return own - self.memory["alias_size_in_bytes"] + facts.unread_bytes


def has_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def count_program(program: StepProgram, mode: Mode, *, schedule: bool = False) -> ProgramCounts:
    """Counts what is in a program; with `schedule` also reads the static schedules of a compiled one."""
    facts = program.facts
    with _run_worker(program.serialized, facts.slice, facts.sizes, mode, schedule=schedule) as directory:
        return read_counts(directory, facts, mode, schedule=schedule)


def compile_exported(serialized: bytes, slice_: Slice, sizes: MeshSizes) -> tuple[StepSchedule, Mapping[str, Any]]:
    """The schedule of any program that jax.export wrote, and the worker's report: memory, cost, compiler, seconds.

    Raises CompilationError, ScheduleError.
    """
    if not has_tpu_compiler():
        raise CompilationError(
            f"libtpu, the TPU's compiler, is not installed; on Linux with x86_64: {install_command('tpu')}"
        )
    with _run_worker(serialized, slice_, sizes, "compile", schedule=True) as directory:
        text = (directory / "program.hlo").read_text(encoding="utf-8")
        report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
        return read_step(directory / SCHEDULE_DIRECTORY, text, slice_, sizes, report["compiler"]), report


def partition_exported(serialized: bytes, slice_: Slice, sizes: MeshSizes) -> Module:
    """One device's part of any program that jax.export wrote, as XLA's partitioner makes it: needs no TPU compiler.

    Raises CompilationError.
    """
    with _run_worker(serialized, slice_, sizes, "partition", schedule=False) as directory:
        return Module((directory / "program.hlo").read_text(encoding="utf-8"))


def read_counts(directory: Path, facts: ProgramFacts, mode: Mode, *, schedule: bool = False) -> ProgramCounts:
    """The counts of what the worker left in its directory."""
    text = (directory / "program.hlo").read_text(encoding="utf-8")
    report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    module = Module(text)
    step, refused = None, None
    if schedule:
        try:
            step = read_step(directory / SCHEDULE_DIRECTORY, text, facts.slice, facts.sizes, report["compiler"])
        except (ScheduleError, UnsupportedError) as error:
            refused = str(error)
    return ProgramCounts(
        source=mode,
        traffic=explain_traffic(module.collectives(), facts.sizes, facts.weight_shapes, facts.work.text_tokens),
        product_flops=module.product_flops() if mode == "partition" else None,
        kernel_flops=module.kernel_flops(),
        kernels=module.kernels(),
        square_arrays=square_arrays(module.shapes(), facts.work, facts.sizes),
        seconds=report["seconds"],
        memory=report.get("memory"),
        cost=report.get("cost"),
        compiler=report.get("compiler"),
        schedule=step,
        schedule_refused=refused,
    )


@contextlib.contextmanager
def _run_worker(serialized: bytes, slice_: Slice, sizes: MeshSizes, mode: Mode, *, schedule: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-plan-") as name:
        directory = Path(name)
        (directory / "program").write_bytes(serialized)
        request = _request(slice_, sizes, mode, directory, schedule=schedule)
        (directory / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run_process(directory, mode)
        yield directory


def _request(slice_: Slice, sizes: MeshSizes, mode: Mode, directory: Path, *, schedule: bool) -> Mapping[str, Any]:
    return {
        "mode": mode,
        "program": str(directory / "program"),
        "directory": str(directory),
        "schedule": str(directory / SCHEDULE_DIRECTORY) if schedule else None,
        "sizes": dataclasses.asdict(sizes),
        "devices": sizes.device_count,
        "topology": f"{slice_.chip.compiler_name or slice_.chip.name}:{slice_.topology}",
        "accelerator": slice_.name,
        "chip": slice_.chip.name,
        "host_bounds": _host_bounds(slice_),
    }


def _host_bounds(slice_: Slice) -> tuple[int, ...] | None:
    """Chips per host for slices of one or two chips; None: libtpu's default of 2×2."""
    sides = (*map(int, slice_.topology.split("x")), 1, 1)[:3]
    return sides if slice_.chips < 4 else None


def _run_process(directory: Path, mode: Mode) -> None:
    # Where this package was imported from, whatever the caller's directory is.
    path = os.pathsep.join((str(Path(comfy_tpu.__file__).parents[1]), *filter(None, (os.environ.get("PYTHONPATH"),))))
    command = [sys.executable, "-m", "comfy_tpu.planning.worker", str(directory / "request.json")]
    what = "the TPU compiler" if mode == "compile" else "XLA's partitioner"
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"{what} took more than {_TIMEOUT // 60} minutes and was stopped") from error
    if done.returncode or not (directory / "report.json").is_file():
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        reason = next((line for line in reversed(said) if "Error" in line), said[-1])
        raise CompilationError(explain_refusal(what, reason))


def explain_refusal(what: str, reason: str) -> str:
    """One sentence that says which of the known limits a compiler met, with its own words."""
    own = reason[:_REASON_CHARACTERS_MAX]
    if re.search(r"[Tt]opology", reason):
        return f"{what} does not know this topology: {own}"
    if re.search(r"\bvmem\b|scoped (?:vmem|allocation)", reason, re.IGNORECASE):
        return f"{what} refused the program, because a kernel does not fit in VMEM: {own}"
    return f"{what} refused the program: {own}"
