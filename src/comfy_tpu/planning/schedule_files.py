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
from typing import Any

import numpy as np

from comfy_tpu.errors import ComfyTpuError

_FILE = re.compile(r"\d+-(.+)-\d+-(final_bundles|final_hlo-static-per-bundle-utilization)\.txt")
_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*((?:> ?)*)\{")
_REGION = re.compile(r"(Start|End|Start/End empty) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \((!?)%(p\w+)\) target = \$region(\d+)")
_COMPARISON = re.compile(r"%(p\w+) = scmp\.(\w\w)\.[us]32\.totalorder (?:\(!?%\w+\), )?%(s\w+), %?(\w+)")
_JUNCTION = re.compile(r"%(p\w+) = p(?:and|nand|or) (?:\(!?%\w+\), )?%(p\w+), %(p\w+)")
_ADDITION = re.compile(r"%(s\w+) = sadd\.s32 (\d+), %(s\w+)")
_STAGE = re.compile(r"stage = (\d+)")
_DIMENSION = re.compile(r"iter bound = (\d+)")
# The next index of a dimension, which starts again at its size. Before libtpu 0.0.51 a move has no type.
_WRAP = re.compile(r"%(s\w+) = smov(?:\.u32)? \(%(p\w+), %(s\w+)\), 0\b")
_INDEX = re.compile(r"%(s\w+) = (?:sphi|sld|smov(?:\.u32)?) [^/;\n]*/\*([^*]*)\*/")
_SELECTION = re.compile(r"%(s\w+) = smov(?:\.u32)? \(!%p\w+, %s\w+\), %(s\w+)")
_SPILL = re.compile(r"sst \[smem:\[(#\w+)_spill\]\] %(s\w+)")
_FILL = re.compile(r"%(s\w+) = sld \[smem:\[(#\w+)_spill\]\]")
# A branch takes effect after four more bundles: where one skips a region, the region begins behind them.
_DELAY = 4
# Smaller ones are transfers that are started or awaited, in nearly every iteration.
_LEAST_REGION = 100
# Of one dimension: an array of its indices is made.
_LARGEST_GRID = 2**24
_OPPOSITE = {"gt": "le", "le": "gt", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


# By one name in all versions: libtpu before 0.0.51 counts the rows through the matrix units as MXU, and their pushes
# not at all.
_UNITS = {
    **{unit: unit for unit in ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VSTORE", "SALU")},
    **{unit: unit for unit in ("VLOAD:FILL", "VSTORE:SPILL")},
    "MXU": "MATMUL",
}


class ScheduleError(ComfyTpuError):
    """A schedule is missing, or is written in a form that is not known."""


def make_dump_flags(directory: Path) -> tuple[str, ...]:
    """The flags of LIBTPU_INIT_ARGS with which libtpu writes schedules. Only what is read here: 4 MB for one attention
    kernel, which leaves 130 to 340 MB with all passes."""
    return (
        f"--xla_jf_dump_to={directory}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=.*final_(bundles|hlo-static).*",
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
    cycles: float
    """Bundles, each as often as it runs in one execution of the program."""
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
    matmuls: float = 0.0
    """Instructions that send rows through a matrix unit, each as often as it runs."""
    undecided_branches: int = 0
    """Branches around large regions that depend on values. Of regions that exclude each other the smallest is counted,
    in every iteration; others are counted in every iteration."""

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
        """The region that takes the most cycles and holds no other: the body of a kernel's loop."""
        leaves = [region for region in self.regions if not any(_holds(region, other) for other in self.regions)]
        return max(leaves, key=lambda region: region.cycles, default=None)


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
        name,
        listing.read_text(encoding="utf-8", errors="replace"),
        utilization.read_text(encoding="utf-8", errors="replace"),
    )


def parse_schedule(name: str, listing: str, utilization: str) -> ProgramSchedule:
    """Raises ScheduleError for texts of another form."""
    try:
        return _parse_schedule(name, listing, utilization)
    except (ArithmeticError, LookupError, ValueError) as error:  # of numbers that no program has
        raise ScheduleError(
            f"the schedule of {name} is written in a form that is not known ({type(error).__name__}: {error})"
        ) from error


def _parse_schedule(name: str, listing: str, utilization: str) -> ProgramSchedule:
    table, code = parse_utilization(utilization), _Listing(listing)
    if len(table.slots) != code.bundles:
        raise ScheduleError(
            f"the schedule of {name} lists {code.bundles} bundles, but slots of {len(table.slots)}; this version of "
            "libtpu writes another form"
        )
    capacity = dict(zip(table.units, table.capacity, strict=True))
    times, undecided = code.execution_counts()
    regions = tuple(
        Region(
            number,
            first,
            last,
            float(times[first : last + 1].sum()),
            _count_slots(table, slice(first, last + 1)),
            capacity,
        )
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
        matmuls=float(times @ code.matmuls),
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
    if not units or len(units) != len(capacity) or any(len(row) != len(units) for row in rows) or min(capacity) < 1:
        raise ScheduleError("libtpu writes the slots of a schedule in a form that is not known")
    if unknown := [unit for unit in units if unit not in _UNITS]:
        raise ScheduleError(
            f"the schedule counts the slots of unknown units: {', '.join(unknown)}; expected {', '.join(_UNITS)}; this "
            "version of libtpu writes another form"
        )
    units = [_UNITS[unit] for unit in units]
    if "MATMUL" not in units:
        raise ScheduleError(
            "libtpu writes the slots of a schedule in a form that is not known: none of the matrix units"
        )
    return Utilization(tuple(units), tuple(capacity), np.array(rows, dtype=np.int64).reshape(-1, len(units)))


@dataclasses.dataclass(frozen=True)
class _Branch:
    bundle: int
    negated: bool
    predicate: str
    target: int
    """The bundle that it leads to."""

    @property
    def skipped(self) -> slice:
        return slice(self.bundle + _DELAY + 1, self.target)

    @property
    def length(self) -> int:
        return self.target - self.bundle - _DELAY - 1


_Comparison = tuple[str, str, str]
"""Operation, register, and a register or a number."""


class _Listing:
    """The listing of a program's bundles."""

    def __init__(self, text: str) -> None:
        self._lines = _bundle_lines(text)
        whole = "\n".join(self._lines)
        self._comparisons: dict[str, _Comparison] = {found[0]: found[1:] for found in _COMPARISON.findall(whole)}
        self._junctions: dict[str, tuple[str, str]] = {found[0]: found[1:] for found in _JUNCTION.findall(whole)}
        self._sums = {name: (int(constant), other) for name, constant, other in _ADDITION.findall(whole)}
        self._dimensions, self._sizes = self._read_grid(whole)
        self.regions, self._branches = self._find_regions()

    @property
    def bundles(self) -> int:
        return len(self._lines)

    def _read_grid(self, text: str) -> tuple[dict[str, int], dict[int, int]]:
        """The dimension of the grid that a register counts, and the size of each dimension."""
        dimensions = {
            register: int(found[1])
            for register, comment in _INDEX.findall(text)
            if (found := _DIMENSION.search(comment))
        }
        # libtpu 0.0.42 leaves the comment away where a spilled register is loaded again.
        spilled = {slot: dimensions[register] for slot, register in _SPILL.findall(text) if register in dimensions}
        for register, slot in _FILL.findall(text):
            if slot in spilled:
                dimensions.setdefault(register, spilled[slot])
        selections = dict(_SELECTION.findall(text))
        sizes = {}
        for index, predicate, following in _WRAP.findall(text):
            _, _, size = self._comparisons.get(predicate, ("", "", ""))
            base = selections.get(following) or self._sums.get(following, (1, ""))[1]
            dimension = dimensions.get(index, dimensions.get(base))
            if dimension is not None and size.isdigit():
                sizes[dimension] = int(size)
        return dimensions, sizes

    def _find_regions(self) -> tuple[dict[int, tuple[int, int]], list[_Branch]]:
        regions: dict[int, tuple[int, int]] = {}
        starts: dict[int, int] = {}
        found: list[tuple[int, bool, str, int]] = []
        for bundle, line in enumerate(self._lines):
            for kind, number in _REGION.findall(line):
                if kind == "End":
                    regions[int(number)] = (starts.get(int(number), bundle), bundle)
                else:
                    starts[int(number)] = bundle
            found += [(bundle, bool(sign), predicate, int(region)) for sign, predicate, region in _BRANCH.findall(line)]
        branches = [
            _Branch(bundle, negated, predicate, starts[region])
            for bundle, negated, predicate, region in found
            if region in starts
        ]
        return regions, branches

    @property
    def matmuls(self) -> np.ndarray:
        """Instructions of each bundle that send rows through a matrix unit."""
        return np.array([line.count("= vmatmul.") for line in self._lines])

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        found = [
            Loop(branch.target, branch.bundle, self._count_trips(branch))
            for branch in self._branches
            if branch.target <= branch.bundle
        ]
        return tuple(sorted(found, key=lambda loop: (loop.first, -loop.last)))

    def _count_trips(self, branch: _Branch) -> int | None:
        operation, register, limit = self._comparisons.get(branch.predicate, ("", "", ""))
        if not branch.negated or operation != "ge" or not limit.isdigit():
            return None
        step, _ = self._sums.get(register, (1, ""))
        body = self._lines[branch.target : branch.bundle + 1]
        # The pipeline of transfers is filled first: as many iterations as the largest stage that registers belong to.
        stages = max((int(number) for line in body for number in _STAGE.findall(line)), default=0)
        return max(1, -(-int(limit) // step) - stages)

    def execution_counts(self) -> tuple[np.ndarray, int]:
        """How often each bundle runs, and the number of branches that nothing here decides."""
        times = np.ones(self.bundles)
        for loop in self.loops:
            times[loop.first : loop.last + 1] *= loop.trips or 1
        undecided = []
        for branch in self._branches:
            if branch.length <= 0:
                continue
            share = self._holding_share(branch.predicate)
            if share is not None:
                times[branch.skipped] *= share if branch.negated else 1 - share
            elif branch.length >= _LEAST_REGION:
                undecided.append(branch)
        for branch in undecided:
            others = [other for other in undecided if self._are_alternatives(branch, other)]
            if any((other.length, other.bundle) < (branch.length, branch.bundle) for other in others):
                times[branch.skipped] = 0
        return times, len(undecided)

    def _holding_share(self, predicate: str) -> float | None:
        """The share of iterations in which a predicate holds, where it compares a grid index; else None."""
        operation, register, text = self._comparisons.get(predicate, ("", "", ""))
        offset, base = 0, register
        if register not in self._dimensions and register in self._sums:
            offset, base = self._sums[register]
        size = self._sizes.get(self._dimensions.get(base, -1))
        if size is None or size > _LARGEST_GRID or operation not in _COMPARE or not text.isdigit():
            return None
        index = _as_signed(np.arange(size, dtype=np.int64) + offset)
        return float(np.mean(_COMPARE[operation](index, _as_signed(int(text)))))

    def _are_alternatives(self, one: _Branch, other: _Branch) -> bool:
        """Whether the bodies of two branches exclude each other: one runs where a comparison holds, the other where its
        opposite does."""
        if one is other or not (one.target <= other.bundle or other.target <= one.bundle):
            return False
        opposite = {(_OPPOSITE.get(operation), *operands) for operation, *operands in self._leaves(one.predicate)}
        return not opposite.isdisjoint(self._leaves(other.predicate))

    def _leaves(self, predicate: str) -> set[_Comparison]:
        """The comparisons that a predicate is made of."""
        seen, open_ = {predicate}, [predicate]
        while open_:
            for other in self._junctions.get(open_.pop(), ()):
                if other not in seen:  # a text may name itself, or the same one from many
                    seen.add(other)
                    open_.append(other)
        return {self._comparisons[each] for each in seen - set(self._junctions) if each in self._comparisons}


def _as_signed(value: Any) -> Any:
    """A 32-bit register as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


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
