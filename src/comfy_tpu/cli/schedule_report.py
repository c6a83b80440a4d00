"""The schedule of a step as lines of text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from comfy_tpu.planning.schedule import Operation, StepSchedule
from comfy_tpu.planning.schedule_files import ProgramSchedule

Table = Callable[[Iterable[Sequence[str]]], list[str]]

_BAR_WIDTH = 40
_LONGEST = 12
_LEAST_REGION = 200
"""Bundles of the smallest region that is listed."""
_UNITS = ("MATMUL", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")


def disclaimer(step: StepSchedule) -> str:
    return (
        f"An estimate by the static schedules of {step.compiler} at {step.clock / 1e9:.3f} GHz; nothing ran on a TPU. "
        "Waits inside of a program are not in it."
    )


def choose_unit(seconds: float) -> tuple[str, float]:
    """The unit in which parts of so much time are printed with three decimals, and how many of it a second has."""
    return ("s", 1.0) if seconds >= 1.0 else ("ms", 1e3)


def schedule_lines(step: StepSchedule, table: Table) -> Iterable[str]:
    yield f"One step by schedule: {step.seconds:.3g} s. {disclaimer(step)}"
    yield ""
    by_bound = {k: v for k, v in step.seconds_by_bound.items() if v > 1e-4 * step.seconds}
    yield from table(_share_rows("part", {str(part): value for part, value in step.seconds_by_part.items()}))
    yield ""
    yield from table(_share_rows("bound by", by_bound))
    yield ""
    yield from table(_operation_rows(step))
    yield ""
    yield from _kernel_lines(step)
    yield _collective_line(step)
    for branch in step.branches:
        others = ", ".join(f"{name} {value * 1e3:.3g} ms" for name, value in branch.seconds.items())
        yield f"{branch.name}: the cheapest branch {branch.counted} is counted; {others}."
    if step.uncounted_loops:
        yield f"{step.uncounted_loops} loops whose trips only the running program knows are counted once."


def _share_rows(title: str, seconds: dict[str, float]) -> Iterable[Sequence[str]]:
    total = sum(seconds.values()) or 1.0
    unit, factor = choose_unit(total)
    yield ("", title, unit, "share", "")
    for name, value in seconds.items():
        yield ("", name, f"{value * factor:.3f}", f"{value / total:.0%}", "#" * round(_BAR_WIDTH * value / total))


def _operation_rows(step: StepSchedule) -> Iterable[Sequence[str]]:
    unit, factor = choose_unit(step.seconds)
    yield ("", "longest", "times", "ms each", unit, "bound", "cycles", "GB r/w", *_UNITS, "spills")
    for item in sorted(step.operations, key=lambda item: -item.total_seconds)[:_LONGEST]:
        yield (
            "",
            item.name,
            str(item.times),
            f"{item.seconds * 1e3:.3f}",
            f"{item.total_seconds * factor:.3f}",
            item.bound,
            f"{item.cycles:,.0f}" if item.cycles is not None else "",
            f"{item.memory_bytes / 1e9:.3f}",
            *(_percent(item, unit) for unit in _UNITS),
            _percent(item, "VSTORE:SPILL"),
        )


def _percent(item: Operation, unit: str) -> str:
    return f"{item.shares[unit]:.0%}" if unit in item.shares else ""


def _kernel_lines(step: StepSchedule) -> Iterable[str]:
    for name in dict.fromkeys(item.name for item in step.operations if item.part == "attention"):
        schedule = step.schedules.get(name)
        body = schedule.body if schedule else None
        if schedule is None or body is None:
            continue
        unit, bundles = body.bound
        yield (
            f"{name}: {body.bundles:,} bundles in the body of its loop, bound {unit} {bundles:,}; "
            f"spills take {body.shares.get('VSTORE:SPILL', 0.0):.0%} of its store slots."
        )


def _collective_line(step: StepSchedule) -> str:
    exposed = sum(item.total_seconds for item in step.collectives)
    hidden = sum(item.hidden_seconds for item in step.collectives)
    beside = dict.fromkeys(name for item in step.collectives for name in item.beside[:1])
    behind = f", behind {', '.join(list(beside)[:4])}" if beside else ""
    unit, factor = choose_unit(step.seconds)
    return f"Collectives: {exposed * factor:.3f} {unit} in the open, {hidden * factor:.3f} {unit} hidden{behind}."


def schedule_document(step: StepSchedule) -> dict[str, Any]:
    return {
        "estimate": disclaimer(step),
        "compiler": step.compiler,
        "clock": step.clock,
        "seconds": step.seconds,
        "by_part": step.seconds_by_part,
        "by_bound": step.seconds_by_bound,
        "memory_bytes": step.memory_bytes,
        "collectives": {
            "exposed": sum(item.total_seconds for item in step.collectives),
            "hidden": sum(item.hidden_seconds for item in step.collectives),
        },
        "operations": [_operation_document(item) for item in step.operations],
        "programs": {name: program_document(schedule) for name, schedule in _programs(step).items()},
        "branches": [
            {
                "name": branch.name,
                "times": branch.times,
                "counted": branch.counted,
                "seconds": dict(branch.seconds),
            }
            for branch in step.branches
        ],
        "unscheduled": list(step.unscheduled),
        "uncounted_loops": step.uncounted_loops,
    }


def _programs(step: StepSchedule) -> dict[str, ProgramSchedule]:
    return {schedule.name: schedule for schedule in step.schedules.values()}


def _operation_document(item: Operation) -> dict[str, Any]:
    return {
        "name": item.name,
        "source": item.source,
        "part": item.part,
        "times": item.times,
        "seconds": item.seconds,
        "bound": item.bound,
        "cycles": item.cycles,
        "memory_bytes": item.memory_bytes,
        "transfer_seconds": item.transfer_seconds,
        "beside": list(item.beside[:4]),
    }


def program_document(schedule: ProgramSchedule) -> dict[str, Any]:
    unit, cycles = schedule.bound
    return {
        "bundles": schedule.bundles,
        "cycles": schedule.cycles,
        "bound": {"unit": unit, "cycles": cycles},
        "slots": {name: round(share, 4) for name, share in schedule.shares.items()},
        "matmuls": schedule.matmuls,
        "loops": [loop.trips for loop in schedule.loops],
        "undecided_branches": schedule.undecided_branches,
        "regions": [
            {
                "number": region.number,
                "bundles": region.bundles,
                "bound": {"unit": region.bound[0], "bundles": region.bound[1]},
                "slots": {name: round(share, 4) for name, share in region.shares.items()},
            }
            for region in schedule.regions
            if region.bundles >= _LEAST_REGION
        ],
    }
