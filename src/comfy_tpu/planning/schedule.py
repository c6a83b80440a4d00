"""The time of a step by the TPU compiler's own schedules: the scheduled program is walked, one instruction at a time.

An instruction takes the larger of its cycles, by its static schedule, and of its bytes of device memory at the chip's
bandwidth. A transfer or a collective that was started earlier costs what is left of it when its result is awaited.
Nothing runs: this is an estimate.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import Slice
from comfy_tpu.parallel.traffic import Traffic, sent_bytes, transfer_seconds
from comfy_tpu.planning.hlo import Collective, Instruction, Module, collective_chain
from comfy_tpu.planning.hlo_bytes import count_bytes, moved_bytes
from comfy_tpu.planning.schedule_files import ProgramSchedule, list_programs, read_schedules
from comfy_tpu.planning.twins import find_twins

Part = Literal["attention", "products", "element-wise", "layout changes", "collectives", "memory waits"]
PARTS: tuple[Part, ...] = get_args(Part)

HBM, LINKS = "HBM", "interconnect"
"""What bounds an instruction, beside the units of a core."""

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_MOVES = {
    *("copy", "transpose", "reshape", "pad", "slice", "dynamic-slice", "dynamic-update-slice", "broadcast"),
    *("concatenate", "bitcast", "reverse", "gather", "iota"),
}
_PRODUCTS = {"convolution", "dot"}
# Below it an instruction without a schedule is a counter or a flag; a microsecond or so of memory time.
_LEAST_BYTES = 1_000_000


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of a step, on one device."""

    name: str
    source: str
    """Its name in the traced program."""
    part: Part
    times: int
    """Executions in a step."""
    seconds: float
    """Of one execution. Of a collective: what nothing hides."""
    bound: str
    """The unit that bounds it, HBM, or the interconnect."""
    cycles: float | None = None
    """By its schedule; None: it has none."""
    memory_bytes: int = 0
    """Bytes of device memory that one execution reads and writes."""
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Used slots of each unit, of those in its cycles."""
    transfer_seconds: float = 0.0
    """Of a collective or an asynchronous copy: the duration of the transfer."""
    beside: tuple[str, ...] = ()
    """Of a collective: the instructions that run while it is under way, the longest first."""

    @property
    def total_seconds(self) -> float:
        return self.times * self.seconds

    @property
    def hidden_seconds(self) -> float:
        """Of all executions."""
        return self.times * max(0.0, self.transfer_seconds - self.seconds)


@dataclasses.dataclass(frozen=True)
class Branch:
    """A conditional: the cheapest of its branches is counted."""

    name: str
    times: int
    counted: str
    """The computation that is counted."""
    seconds: Mapping[str, float]
    """Of one execution, by computation."""


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """A step's time by part, from static schedules: an estimate."""

    compiler: str
    """Name and version."""
    clock: float
    """Cycles per second."""
    operations: tuple[Operation, ...]
    """In the order of the program."""
    branches: tuple[Branch, ...]
    schedules: Mapping[str, ProgramSchedule]
    """By instruction; instructions that are alike share one."""

    @property
    def seconds(self) -> float:
        return sum(operation.total_seconds for operation in self.operations)

    @property
    def seconds_by_part(self) -> dict[Part, float]:
        return {
            part: sum(operation.total_seconds for operation in self.operations if operation.part == part)
            for part in PARTS
        }

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Seconds by the unit that bounds them, the largest first."""
        found: dict[str, float] = {}
        for operation in self.operations:
            found[operation.bound] = found.get(operation.bound, 0.0) + operation.total_seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def collectives(self) -> tuple[Operation, ...]:
        return tuple(operation for operation in self.operations if operation.part == "collectives")

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that a step reads and writes, as far as they are counted."""
        return sum(operation.times * operation.memory_bytes for operation in self.operations)

    @property
    def unscheduled(self) -> tuple[str, ...]:
        """Instructions that read or write memory and have no schedule: their bytes are counted alone."""
        return tuple(
            operation.name
            for operation in self.operations
            if operation.cycles is None and operation.part not in ("collectives", "memory waits")
        )

    @property
    def uncounted_loops(self) -> int:
        return sum(schedule.uncounted_loops for schedule in self.schedules.values())


def read_step(directory: Path, program: str, slice_: Slice, sizes: MeshSizes, compiler: str) -> StepSchedule:
    """The schedule of a step from the compiled program's text and the directory that libtpu wrote.

    Raises ScheduleError if there is no schedule, or one in an unknown form.
    """
    module = Module(program)
    twins = find_twins(module, list_programs(directory))
    files = read_schedules(directory, dict.fromkeys(twins.values()))
    schedules = {name: files[twin] for name, twin in twins.items()}
    walk = _Walk(module, schedules, slice_, sizes)
    walk.run()
    return StepSchedule(
        compiler=compiler,
        clock=slice_.chip.clock,
        operations=tuple(walk.operations),
        branches=tuple(walk.branches),
        schedules=schedules,
    )


def kernel_cycles(schedule: ProgramSchedule, slice_: Slice) -> float:
    """Cycles of one execution: its bundles, or what the matrix units need for the rows that it sends through them.

    The compiler for v5e and v5p sends rows faster than the units take them, and the hardware waits.
    """
    units = schedule.capacity["MATMUL"]
    return max(schedule.cycles, schedule.matmuls * slice_.chip.matmul_cycles / units)


@dataclasses.dataclass
class _Pending:
    """A transfer under way."""

    end: float
    seconds: float
    beside: dict[str, float]


class _Walk:
    """Walks the scheduled program with a clock, one queue for transfers within the device and one for its links."""

    def __init__(
        self, module: Module, schedules: Mapping[str, ProgramSchedule], slice_: Slice, sizes: MeshSizes
    ) -> None:
        self._module, self._schedules, self._slice, self._sizes = module, schedules, slice_, sizes
        self.operations: list[Operation] = []
        self.branches: list[Branch] = []
        self._now = 0.0
        self._copies_end = 0.0
        self._links_end = 0.0
        self._pending: dict[str, _Pending] = {}

    def run(self) -> None:
        self._visit(self._module.entry, 1)

    def _visit(self, computation: str, times: int) -> None:
        instructions = self._module.computation(computation)
        awaited = {
            name: item for item in instructions if item.operation.endswith("-done") for name in item.operand_names
        }
        last_of_chain = self._last_of_chains(instructions)
        for instruction in instructions:
            operation = instruction.operation
            if operation in _FREE:
                continue
            if operation == "while":
                self._visit_loop(instruction, times)
            elif operation == "conditional":
                self._visit_conditional(instruction, times)
            elif operation == "call":
                for called in self._module.called_computations(instruction):
                    self._visit(called, times)
            elif operation.endswith("-done"):
                self._await(instruction, times)
            elif operation.endswith("-start"):
                self._start(instruction, awaited.get(instruction.name))
            else:
                self._execute(instruction, times, last_of_chain)

    def _visit_loop(self, instruction: Instruction, times: int) -> None:
        trips = self._module.trip_count(instruction)
        body = re.search(r"body=%([\w.\-]+)", instruction.text)
        begin = self._now
        self._visit(body[1] if body else "", times * trips)
        self._now = begin + (self._now - begin) * trips

    def _visit_conditional(self, instruction: Instruction, times: int) -> None:
        begin = self._now, self._copies_end, self._links_end, len(self.operations), len(self.branches)
        results: dict[str, tuple[float, list[Operation], list[Branch]]] = {}
        for computation in self._module.called_computations(instruction):
            self._now, self._copies_end, self._links_end = begin[:3]
            self._visit(computation, times)
            results[computation] = self._now - begin[0], self.operations[begin[3] :], self.branches[begin[4] :]
            del self.operations[begin[3] :], self.branches[begin[4] :]
        if not results:
            return
        counted = min(results, key=lambda name: results[name][0])
        seconds, operations, branches = results[counted]
        self._now = begin[0] + seconds
        self.operations += operations
        self.branches += branches
        self.branches.append(
            Branch(
                name=instruction.name,
                times=times,
                counted=counted,
                seconds={name: result[0] for name, result in results.items()},
            )
        )

    def _start(self, instruction: Instruction, done: Instruction | None) -> None:
        collective = self._module.find_collective(instruction)
        if collective is not None:
            self._start_links(instruction.name, self._transfer_seconds(collective[1]))
        elif done is not None:
            seconds = moved_bytes(done) / self._slice.chip.memory_bandwidth
            self._copies_end = max(self._copies_end, self._now) + seconds
            self._pending[instruction.name] = _Pending(self._copies_end, seconds, {})

    def _start_links(self, name: str, seconds: float) -> None:
        self._links_end = max(self._links_end, self._now) + seconds
        self._pending[name] = _Pending(self._links_end, seconds, {})

    def _await(self, instruction: Instruction, times: int) -> None:
        for name in instruction.operand_names:
            pending = self._pending.pop(name, None)
            if pending is None:
                continue
            start = self._module.operands(instruction)[0]
            collective = self._module.find_collective(start) if start is not None else None
            part: Part = "collectives" if collective else "memory waits"
            self._finish(start or instruction, part, pending, times, LINKS if collective else HBM)

    def _finish(self, instruction: Instruction, part: Part, pending: _Pending, times: int, bound: str) -> None:
        wait = max(0.0, pending.end - self._now)
        self._now += wait
        found = self._module.find_collective(instruction)
        self.operations.append(
            Operation(
                name=instruction.name,
                source=found[0].source_name if found else instruction.source_name,
                part=part,
                times=times,
                seconds=wait,
                bound=bound,
                memory_bytes=0,
                transfer_seconds=pending.seconds,
                beside=tuple(sorted(pending.beside, key=lambda name: -pending.beside[name])),
            )
        )

    def _execute(self, instruction: Instruction, times: int, last_of_chain: Mapping[str, tuple[str, str]]) -> None:
        found = self._module.find_collective(instruction)
        if found is None:
            self._append(instruction, times)
            return
        inner, collective = found
        seconds = self._transfer_seconds(collective)
        chain = collective_chain(inner)
        if chain is None:
            self._execute_collective(instruction, inner, seconds, times)
            return
        # One part of a collective that runs beside several fusions: its transfer goes on until the last of them.
        key = "/".join(chain)
        if key not in self._pending:
            self._start_links(key, seconds)
        if instruction.name in last_of_chain:
            self._finish(instruction, "collectives", self._pending.pop(key), times, LINKS)
        self._append(instruction, times)

    def _execute_collective(self, instruction: Instruction, inner: Instruction, seconds: float, times: int) -> None:
        schedule = self._schedules.get(instruction.name)
        cycles = kernel_cycles(schedule, self._slice) if schedule else None
        self._links_end = max(self._links_end, self._now) + seconds
        end = max(self._links_end, self._now + (cycles or 0.0) / self._slice.chip.clock)
        self.operations.append(
            Operation(
                name=instruction.name,
                source=inner.source_name,
                part="collectives",
                times=times,
                seconds=end - self._now,
                bound=LINKS,
                cycles=cycles,
                memory_bytes=count_bytes(self._module, instruction),
                shares=dict(schedule.shares) if schedule else {},
                transfer_seconds=seconds,
            )
        )
        self._now = end

    def _append(self, instruction: Instruction, times: int) -> None:
        schedule = self._schedules.get(instruction.name)
        nbytes = count_bytes(self._module, instruction)
        chip = self._slice.chip
        # Custom calls that are no kernels put the parts of a prefetched array together, and do nothing.
        renames = instruction.operation == "custom-call" and "tpu_custom_call" not in instruction.text
        if schedule is None and (renames or nbytes < _LEAST_BYTES):
            return
        cycles = kernel_cycles(schedule, self._slice) if schedule else None
        computing, moving = (cycles or 0.0) / chip.clock, nbytes / chip.memory_bandwidth
        seconds = max(computing, moving)
        self._now += seconds
        for pending in self._pending.values():
            pending.beside[instruction.name] = seconds
        self.operations.append(
            Operation(
                name=instruction.name,
                source=instruction.source_name,
                part=self._part(instruction),
                times=times,
                seconds=seconds,
                bound=schedule.bound[0] if schedule and computing >= moving else HBM,
                cycles=cycles,
                memory_bytes=nbytes,
                shares=dict(schedule.shares) if schedule else {},
            )
        )

    def _part(self, instruction: Instruction) -> Part:
        if instruction.operation == "custom-call":
            return "attention"
        inside = set(self._inner_operations(instruction))
        if inside & _PRODUCTS:
            return "products"
        return "layout changes" if inside <= _MOVES | _FREE else "element-wise"

    def _inner_operations(self, instruction: Instruction) -> Iterable[str]:
        if instruction.operation != "fusion":
            yield instruction.operation
        for called in self._module.called_computations(instruction):
            for inner in self._module.computation(called):
                yield from self._inner_operations(inner)

    def _last_of_chains(self, instructions: list[Instruction]) -> dict[str, tuple[str, str]]:
        """The last instruction of each collective that runs beside several."""
        last: dict[tuple[str, str], str] = {}
        for instruction in instructions:
            if instruction.operation == "fusion" and (found := self._module.find_collective(instruction)) is not None:
                chain = collective_chain(found[0])
                if chain is not None:
                    last[chain] = instruction.name
        return {name: chain for chain, name in last.items()}

    def _transfer_seconds(self, collective: Collective) -> float:
        group = len(collective.group)
        traffic = Traffic(
            cause="",
            kind=collective.kind,
            axes=collective.axes(self._sizes),
            group=group,
            count=1,
            nbytes=sent_bytes(collective.kind, group, collective.nbytes),
        )
        return transfer_seconds(traffic, self._slice, self._sizes)
