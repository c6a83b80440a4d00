"""Reads the static schedules that libtpu writes: VLIW bundles, loops and regions, and how full each unit's slots are.

libtpu writes two files for every program (a fusion, a Pallas kernel) where it is started with `DUMP_FLAGS`: the listing
of bundles, and the slots that each bundle uses. One bundle is one cycle unless the hardware waits for memory, so a
program's cycles are its bundles, each as often as the loops around it run. Waits are not in these files.

Plain Python and numpy: neither jax nor libtpu is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from comfy_tpu.errors import ComfyTpuError

_FILE = re.compile(r"\d+-(.+)-\d+-(final_bundles|final_hlo-static-per-bundle-utilization)\.txt")
_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*((?:> ?)*)\{")
_REGION = re.compile(r"(Start|End|Start/End empty) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \((!?)%(p\w+)\) target = \$region(\d+)")
_COMPARISON = re.compile(r"%(p\w+) = scmp\.(\w\w)\.[us]32\.totalorder (?:\(!?%\w+\), )?%(s\w+), (\d+)")
_ADDITION = re.compile(r"%(s\w+) = sadd\.s32 (\d+), %s\w+")
_STAGE = re.compile(r"stage = (\d+)")
_DIMENSION = re.compile(r"iter bound = (\d+)")
_WRAP = re.compile(r"smov\.u32 \(%(p\w+), %\w+\), 0 /\*[^*]*?iter bound = (\d+)")
_INDEX = re.compile(r"%(s\w+) = sphi [^/]*/\*([^*]*)\*/")
# A branch takes effect after four more bundles: where one skips a region, the region begins behind them.
_DELAY = 4
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


class ScheduleError(ComfyTpuError):
    """A schedule is missing, or is written in a form that is not known."""


def make_dump_flags(directory: Path) -> tuple[str, ...]:
    """The flags of LIBTPU_INIT_ARGS with which libtpu writes schedules. Only the last passes: 11 MB instead of 130 to
    340 MB for one attention kernel."""
    return (
        f"--xla_jf_dump_to={directory}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=.*final.*",
    )


@dataclasses.dataclass(frozen=True)
class Utilization:
    """The slots that a program's bundles use."""

    units: tuple[str, ...]
    """MATMUL, VALU and so on; "VSTORE:SPILL" are those of VSTORE that spill a register."""
    capacity: tuple[int, ...]
    """Slots of each unit in one bundle."""
    slots: np.ndarray
    """[bundles, units]"""


@dataclasses.dataclass(frozen=True)
class Region:
    """Bundles of one basic block, or of several."""

    number: int
    first: int
    last: int
    """The last bundle, included."""
    used: Mapping[str, int]
    """Slots by unit, in one pass over the region."""
    capacity: Mapping[str, int]

    @property
    def bundles(self) -> int:
        return self.last - self.first + 1

    @property
    def bound(self) -> tuple[str, int]:
        """The unit that needs the most bundles, and how many."""
        return _find_bound(self.used, self.capacity)

    @property
    def shares(self) -> Mapping[str, float]:
        """Used slots of each unit, of those that there are."""
        return _shares(self.used, self.capacity, self.bundles)


@dataclasses.dataclass(frozen=True)
class Loop:
    first: int
    last: int
    trips: int | None
    """Iterations that do work; those that only fill the pipeline of transfers are left out. None: known only when the
    program runs; the loop is counted once."""


@dataclasses.dataclass(frozen=True)
class ProgramSchedule:
    """The static schedule of one program."""

    name: str
    """The name of the HLO instruction."""
    bundles: int
    cycles: float
    """Bundles, each as often as it runs."""
    used: Mapping[str, float]
    """Slots by unit, each as often as it runs."""
    capacity: Mapping[str, int]
    loops: tuple[Loop, ...]
    regions: tuple[Region, ...]
    """In the order of the listing; a region that holds others is listed too."""
    undecided_branches: int = 0
    """Branches around bundles that depend on values: the bundles are counted as if they ran in every iteration."""

    @property
    def uncounted_loops(self) -> int:
        """Loops that are counted once, because only the running program knows their trips."""
        return sum(loop.trips is None for loop in self.loops)

    @property
    def bound(self) -> tuple[str, float]:
        """The unit that needs the most cycles, and how many."""
        return _find_bound(self.used, self.capacity)

    @property
    def shares(self) -> Mapping[str, float]:
        """Used slots of each unit, of those that there are."""
        return _shares(self.used, self.capacity, self.cycles)

    @property
    def spill_share(self) -> float:
        """Store slots that spill a register, of all store slots."""
        return self.shares.get("VSTORE:SPILL", 0.0)

    @property
    def fill_share(self) -> float:
        """Load slots that bring back a spilled register, of all load slots."""
        return self.shares.get("VLOAD:FILL", 0.0)

    @property
    def body(self) -> Region | None:
        """The largest region that holds no other: the body of a kernel's loop."""
        leaves = [region for region in self.regions if not any(_holds(region, other) for other in self.regions)]
        return max(leaves, key=lambda region: region.bundles, default=None)


def list_programs(directory: Path) -> tuple[str, ...]:
    """The names of the programs whose schedules are in a directory."""
    return tuple(sorted(_find_files(directory)))


def read_schedules(directory: Path, names: Iterable[str] | None = None) -> dict[str, ProgramSchedule]:
    """Schedules by program name; of all programs, or of those in `names` that have one.

    Raises ScheduleError if the directory has none at all.
    """
    files = _find_files(directory)
    if not files:
        raise ScheduleError("libtpu wrote no schedule: this version does not know the flags that ask for one")
    wanted = files if names is None else [name for name in names if name in files]
    return {name: read_schedule(name, *files[name]) for name in wanted}


def read_schedule(name: str, listing: Path, utilization: Path) -> ProgramSchedule:
    """The schedule of one program, from the listing of its bundles and the file of slots."""
    return parse_schedule(
        name, listing.read_text(encoding="utf-8", errors="replace"), utilization.read_text(encoding="utf-8")
    )


def parse_schedule(name: str, listing: str, utilization: str) -> ProgramSchedule:
    table, code = parse_utilization(utilization), _Listing(listing)
    if len(table.slots) != code.bundles:
        raise ScheduleError(
            f"the schedule of {name} lists {code.bundles} bundles, but slots of {len(table.slots)}; this version of "
            "libtpu writes another form"
        )
    capacity = dict(zip(table.units, table.capacity, strict=True))
    times, undecided = code.execution_counts()
    regions = tuple(
        Region(number, first, last, _count_slots(table, slice(first, last + 1)), capacity)
        for number, (first, last) in sorted(code.regions.items(), key=lambda item: (item[1][0], -item[1][1]))
    )
    return ProgramSchedule(
        name=name,
        bundles=code.bundles,
        cycles=float(times.sum()),
        used={unit: float(count) for unit, count in zip(table.units, times @ table.slots, strict=True)},
        capacity=capacity,
        loops=code.loops,
        regions=regions,
        undecided_branches=undecided,
    )


def parse_utilization(text: str) -> Utilization:
    """The table of slots: names of units, how many slots each has in a bundle, then a row a bundle."""
    units: list[str] = []
    capacity: list[int] = []
    rows: list[list[int]] = []
    part = ""
    for line in text.splitlines():
        if line.startswith("=="):
            part = line
        elif "CAPAC" in part and line[:1].isalpha():
            units = [name.strip() for name in line.split(",")]
        elif "CAPAC" in part and line.strip():
            capacity = [int(word) for word in line.split()]
        elif "UTIL" in part and line.strip():
            rows.append([int(word) for word in line.split()])
    if not units or len(units) != len(capacity) or any(len(row) != len(units) for row in rows):
        raise ScheduleError("libtpu writes the slots of a schedule in a form that is not known")
    return Utilization(tuple(units), tuple(capacity), np.array(rows, dtype=np.int64).reshape(-1, len(units)))


class _Listing:
    """The listing of a program's bundles."""

    def __init__(self, text: str) -> None:
        self._lines = _bundle_lines(text)
        self._comparisons: dict[str, tuple[str, str, int]] = {}
        self._steps: dict[str, int] = {}
        self._dimensions: dict[str, int] = {}
        """The grid's dimension that a register counts."""
        wraps: dict[int, str] = {}
        self.regions: dict[int, tuple[int, int]] = {}
        started: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._branches: list[tuple[int, bool, str, int]] = []
        for bundle, line in enumerate(self._lines):
            for kind, number in _REGION.findall(line):
                if kind == "End":
                    self.regions[int(number)] = (started.get(int(number), bundle), bundle)
                else:
                    started[int(number)] = self._targets[int(number)] = bundle
            for predicate, operation, register, constant in _COMPARISON.findall(line):
                self._comparisons[predicate] = (operation, register, int(constant))
            for register, step in _ADDITION.findall(line):
                self._steps[register] = int(step)
            for register, comment in _INDEX.findall(line):
                if found := _DIMENSION.search(comment):
                    self._dimensions[register] = int(found[1])
            for predicate, dimension in _WRAP.findall(line):
                wraps[int(dimension)] = predicate
            for negated, predicate, region in _BRANCH.findall(line):
                self._branches.append((bundle, bool(negated), predicate, int(region)))
        self._sizes = {
            dimension: self._comparisons[predicate][2]
            for dimension, predicate in wraps.items()
            if predicate in self._comparisons
        }

    @property
    def bundles(self) -> int:
        return len(self._lines)

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        found = []
        for bundle, negated, predicate, region in self._branches:
            target = self._targets.get(region)
            if target is None or target > bundle:
                continue
            found.append(Loop(target, bundle, self._count_trips(target, bundle, predicate if negated else "")))
        return tuple(sorted(found, key=lambda loop: (loop.first, -loop.last)))

    def _count_trips(self, first: int, last: int, exit_test: str) -> int | None:
        operation, register, limit = self._comparisons.get(exit_test, ("", "", 0))
        if operation != "ge":
            return None
        return max(1, -(-limit // self._steps.get(register, 1)) - self._stages(first, last))

    def _stages(self, first: int, last: int) -> int:
        """Iterations that a loop spends on filling its pipeline: the largest stage that its registers belong to."""
        numbers = [int(number) for line in self._lines[first : last + 1] for number in _STAGE.findall(line)]
        return max(numbers, default=0)

    def execution_counts(self) -> tuple[np.ndarray, int]:
        """How often each bundle runs, and the number of branches that nothing here decides."""
        times = np.ones(self.bundles)
        for loop in self.loops:
            times[loop.first : loop.last + 1] *= loop.trips or 1
        undecided = 0
        for bundle, negated, predicate, region in self._branches:
            target = self._targets.get(region)
            if target is None or target <= bundle + _DELAY:
                continue
            share = self._taken_share(predicate)
            if share is None:
                undecided += 1
            else:
                times[bundle + _DELAY + 1 : target] *= share if negated else 1 - share
        return times, undecided

    def _taken_share(self, predicate: str) -> float | None:
        """The share of iterations in which a predicate holds, where it compares a grid index; else None."""
        comparison = self._comparisons.get(predicate)
        if comparison is None or comparison[1] not in self._dimensions:
            return None
        operation, register, constant = comparison
        size = self._sizes.get(self._dimensions[register])
        if size is None or operation not in _COMPARE:
            return None
        return float(np.mean(_COMPARE[operation](np.arange(size), constant)))


def _bundle_lines(text: str) -> list[str]:
    """One line a bundle: comments may run over several."""
    lines: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += " " + line
    return lines


def _find_files(directory: Path) -> dict[str, tuple[Path, Path]]:
    """Listing and slots of each program. Programs that are compiled twice have the same schedule."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            found.setdefault(match[1], {})[match[2]] = path
    return {
        name: (files["final_bundles"], files["final_hlo-static-per-bundle-utilization"])
        for name, files in found.items()
        if len(files) == 2
    }


def _holds(outer: Region, inner: Region) -> bool:
    return outer.first <= inner.first and inner.last <= outer.last and inner.bundles < outer.bundles


def _count_slots(table: Utilization, bundles: slice) -> dict[str, int]:
    return {unit: int(count) for unit, count in zip(table.units, table.slots[bundles].sum(axis=0), strict=True)}


def _find_bound(used: Mapping[str, float], capacity: Mapping[str, int]) -> tuple[str, int]:
    return max(((unit, -int(-count // capacity[unit])) for unit, count in used.items()), key=lambda item: item[1])


def _shares(used: Mapping[str, float], capacity: Mapping[str, int], bundles: float) -> dict[str, float]:
    return {unit: count / capacity[unit] / max(bundles, 1) for unit, count in used.items()}
