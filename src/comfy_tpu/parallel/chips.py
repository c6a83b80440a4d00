"""Performance figures of each TPU generation, and its slices. Sources and assumptions: docs/plan.md."""

from __future__ import annotations

import dataclasses
import math
import re

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import MeshError

_LARGEST_SLICE = 256


HOST_CHIPS = 4
"""Chips of each host of a slice on several hosts, in every generation."""
SLICES_MAX = 64


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device. A v5p chip is one device; a v7x chip is two, each with half of the chip's figures."""

    name: str
    flops: float
    """Peak bfloat16 operations per second."""
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    """Bytes per second of one link in one direction."""
    matmul_fraction: float
    """Fractions of the peak that large products and attention reach: assumptions."""
    attention_fraction: float
    network_bandwidth: float
    """Bytes per second of one device in one direction over the data centre's network, which joins slices."""
    clock: float
    """Cycles, that is VLIW bundles, per second."""
    matmul_cycles: int
    """Cycles in which a matrix unit takes the 16 rows of one instruction, in bfloat16."""
    devices_per_chip: int = 1
    cores_per_chip: int = 1
    """Cores per chip, by which the names of some generations count: v5p-8 is four chips."""
    dimensions: int = 2
    """Dimensions of the interconnect's torus."""
    compiler_name: str = ""
    """The compiler's name of the chip, where it differs from `name`."""
    one_host_chips: int = 4
    """Chips of the largest slice on one host. A host of a larger slice has HOST_CHIPS."""
    overlaps_gathers: bool = False
    """Whether weights are gathered beside what the chip computes, by its SparseCores (compiler_options.py)."""
    temporaries: float = 1.0
    """Factor on the temporaries of layouts.py, which are fitted on v6e: the most that the chip's compiler allocated for
    Wan 14B (docs/plan.md)."""


# Fractions: the profile of Wan 2.1 14B at 720p on v6e-8 (4.60 s a step, 67 % splash, 14 % products; docs/plan.md) gives
# 0.77 and 0.41. That kernel kept a running maximum, as ours did; by libtpu's schedules the bounded form takes 6,490 of
# 9,977 bundles on v6e and 6,089 of 9,169 on v7x: 0.63 and 0.62. The 256-wide MXU of both is half empty at head_dim 128.
# On v5e and v5p 0.5 was a guess, and their schedules are 1.17 times shorter now.
#
# Clocks: the peak, by what the matrix units do in a cycle. Of a product of two 8192² matrices libtpu 0.0.51 makes
# instructions of 16 rows each: on v5e and v5p times 128 × 128, for four units a core (v5p has two), 16 cycles each;
# on v6e and v7x times 256 × 256, for two units, one every 8 cycles in the v6e schedule. 524,288 operations a cycle and
# 918 TFLOP/s are 1.751 GHz; v5e 131,072 and 1.503; v5p 262,144 and 1.751; v7x, half a chip, 524,288 and 2.200. The
# schedules of v5e, v5p and v7x send rows faster than that: there the peak itself says how many cycles they take.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e",
            197e12,
            16_000_000_000,
            819e9,
            50e9,
            0.77,
            0.59,
            3.125e9,
            1.503e9,
            16,
            one_host_chips=8,
            temporaries=1.5,
        ),
        Chip(
            "v5p",
            459e12,
            95_000_000_000,
            2765e9,
            100e9,
            0.77,
            0.59,
            6.25e9,
            1.751e9,
            16,
            cores_per_chip=2,
            dimensions=3,
            temporaries=1.7,
        ),
        Chip(
            "v6e",
            918e12,
            32_000_000_000,
            1638e9,
            100e9,
            0.77,
            0.63,
            12.5e9,
            1.751e9,
            8,
            one_host_chips=8,
            overlaps_gathers=True,
        ),
        Chip(
            "v7x",
            1153.5e12,
            96_000_000_000,
            3690e9,
            50e9,
            0.77,
            0.62,
            6.25e9,
            2.2e9,
            8,
            devices_per_chip=2,
            cores_per_chip=2,
            dimensions=3,
            compiler_name="tpu7x",
            overlaps_gathers=True,
            temporaries=4.0,
        ),
    )
}

_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x", "v5lite": "v5e"}

_TOPOLOGIES = {
    2: {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    3: {
        1: "1x1x1",
        2: "1x2x1",
        4: "2x2x1",
        8: "2x2x2",
        16: "2x2x4",
        32: "2x4x4",
        64: "4x4x4",
        128: "4x4x8",
        256: "4x8x8",
    },
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice, whose links join its chips from host to host; or several equal ones, joined by the data centre's
    network."""

    chip: Chip
    chips: int
    """Chips of one slice."""
    count: int = 1
    """The number of slices."""

    @property
    def name(self) -> str:
        """Google Cloud's name: v6e-8 is eight chips, v5p-8 four; 2xv6e-8 are two slices of eight."""
        name = f"{self.chip.name}-{self.chips * self.chip.cores_per_chip}"
        return name if self.count == 1 else f"{self.count}x{name}"

    @property
    def device_count(self) -> int:
        return self.count * self.chips * self.chip.devices_per_chip

    @property
    def host_count(self) -> int:
        each = 1 if self.chips <= self.chip.one_host_chips else self.chips // HOST_CHIPS
        return self.count * each

    def crossing_axes(self, sizes: MeshSizes) -> tuple[str, ...]:
        """The axes of a mesh whose collectives go from one slice to another; dp is divided among the slices first."""
        if self.count == 1:
            return ()
        inner = {"dp": sizes.device_count, "sp": sizes.sp * sizes.tp, "tp": sizes.tp}
        own = self.device_count // self.count
        # An axis stays inside where whole groups of it fill a slice.
        return tuple(axis for axis, size in inner.items() if getattr(sizes, axis) > 1 and own % size)

    @property
    def topology(self) -> str:
        return _TOPOLOGIES[self.chip.dimensions][self.chips]

    @property
    def longest_side(self) -> int:
        return max(map(int, self.topology.split("x")))

    def next_larger(self) -> Slice | None:
        return dataclasses.replace(self, chips=self.chips * 2) if self.chips < _LARGEST_SLICE else None


def parse_slice(text: str) -> Slice:
    """The slice of a name such as "v6e-8", also in Google Cloud's spelling ("v5litepod-8", "tpu7x-8"); "2xv6e-8" are
    two slices."""
    several = re.fullmatch(r"\s*(\d{1,9})x(.*)", text)
    if several is not None:
        count, slice_ = int(several[1]), parse_slice(several[2])
        if not 1 <= count <= SLICES_MAX or slice_.count > 1:
            raise MeshError(f"tpu={text!r} is no number of slices; ask for 1 to {SLICES_MAX}: 2xv6e-8", field="tpu")
        return dataclasses.replace(slice_, count=count)
    match = re.fullmatch(r"\s*([A-Za-z]+\d*[A-Za-z]*)-(\d{1,9})\s*", text)
    if match is None:
        raise MeshError(f"tpu={text!r} is not a slice; write a generation and a number, such as v6e-8", field="tpu")
    name, counted = match[1].lower(), int(match[2])
    chip = CHIPS.get(_ALIASES.get(name, name))
    if chip is None:
        raise MeshError(f"tpu={text!r}: unknown generation {match[1]!r}; choose from {', '.join(CHIPS)}", field="tpu")
    chips, rest = divmod(counted, chip.cores_per_chip)
    sizes = _TOPOLOGIES[chip.dimensions]
    if rest or chips not in sizes:
        names = ", ".join(Slice(chip, size).name for size in sizes)
        counts = f" ({chip.name}-N counts {chip.cores_per_chip} cores a chip)" if chip.cores_per_chip > 1 else ""
        raise MeshError(
            f"tpu={text!r} is no slice of 1 to {_LARGEST_SLICE} chips{counts}; choose from {names}", field="tpu"
        )
    return Slice(chip, chips)


def find_slice(chip_name: str, device_count: int, count: int = 1) -> Slice | None:
    """The smallest slice with this many devices, for devices that are attached; None where the chip is not a TPU.

    `count`: the number of slices that they are in.
    """
    chip = CHIPS.get(chip_name)
    if chip is None:
        return None
    chips = 2 ** math.ceil(math.log2(max(1, -(-device_count // (count * chip.devices_per_chip)))))
    return Slice(chip, min(chips, _LARGEST_SLICE), count)
