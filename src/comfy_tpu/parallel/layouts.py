"""Ranks the meshes for a workload on a slice of TPUs by closed formulas of their cost.

Nothing is traced: choosing a mesh takes a millisecond. planning/ counts what the partitioned program really moves, and
tests compare the two. docs/plan.md explains formulas and assumptions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import Chip, Slice
from comfy_tpu.parallel.rules import rule_axes
from comfy_tpu.parallel.traffic import Cause, Kind, Traffic, crosses_slices, sent_bytes, transfer_seconds
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

SPARE_FRACTION = 0.10
"""Share of a chip's memory that must stay free: the estimate's error, the program itself, fragmentation."""

Bound = Literal["compute", "HBM", "interconnect", "network"]

# Live at the worst moment of a block, in arrays of [tokens, hidden] and of [tokens, ffn]: fitted to the TPU compiler's
# figures for Wan 14B at 720p on v6e-8 (4.73 GB for dp2×tp4, 2.67 for dp2×sp2×tp2, 1.61 for dp2×sp4; 0.98 for sp8
# without guidance), compiled so that nothing ran beside a collective.
_LIVE_HIDDEN = 5.3
_LIVE_FFN = 1.2
# The embedded patches, and a copy.
_LIVE_EMBEDDING = 2.0
# More of them where exchanges and gathers run beside products: 2.00 GB for dp2×sp4, 1.11 for sp8 without guidance.
_LIVE_EXCHANGE = 1.4
# A ring holds its own keys and values, those that come, and float32 results of two parts.
_LIVE_RING = 8.0
# Passes over [tokens, hidden] and [tokens, ffn] in a block: norms, modulation, RoPE, residuals, changes of layout.
_PASSES_HIDDEN = 40
_PASSES_FFN = 4
# Splash's tile, by which lengths are padded: sides of at most this, multiples of these. kernels/tuning.py chooses it.
_TILE = 2048
_QUERY_STEP = 128
_KEY_STEP = 256
_LANES = 128
_MATRIX_SIDE = 256
_REGISTER_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    weights: int
    prompt: int
    """Keys and values of the prompt."""
    latents: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.prompt + self.latents + self.temporaries


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of one call of a step's program on one device. A step is one call, unless it computes windows."""

    sizes: MeshSizes
    attention: Literal["ulysses", "ring", "whole"]
    memory: Memory
    matmul_flops: float
    attention_flops: float
    memory_bytes: float
    """Bytes of device memory that are read and written."""
    traffic: tuple[Traffic, ...]
    compute_seconds: float
    memory_seconds: float
    interconnect_seconds: float
    fits: bool
    """Whether the step fits with SPARE_FRACTION of the memory free."""
    network_seconds: float = 0.0
    """Seconds of the collectives that go from one slice to another."""
    crossing_axes: tuple[str, ...] = ()
    """The mesh axes of those collectives."""
    batch: int = 1
    calls: int = 1
    """Calls in a step."""

    @property
    def stays_in_slices(self) -> bool:
        """Whether only dp crosses slices."""
        return set(self.crossing_axes) <= {"dp"}

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    @property
    def sent_bytes(self) -> int:
        return sum(traffic.nbytes for traffic in self.traffic)

    @property
    def step_seconds(self) -> float:
        return self.calls * self.call_seconds

    @property
    def row_seconds(self) -> float:
        """Seconds for a row of the batch."""
        return self.call_seconds / self.batch

    @property
    def call_seconds(self) -> float:
        # Memory is read beside the products. Collectives are counted in full, though compilers put most of them beside
        # products where there are long ones (compiler_options.py): only Wan's schedules were looked at.
        return max(self.compute_seconds, self.memory_seconds) + self.interconnect_seconds + self.network_seconds

    @property
    def bound(self) -> Bound:
        costs: dict[Bound, float] = {
            "compute": self.compute_seconds,
            "HBM": self.memory_seconds,
            "interconnect": self.interconnect_seconds,
            "network": self.network_seconds,
        }
        return max(costs, key=lambda name: costs[name])


def rank_layouts(work: Workload, slice_: Slice, device_count: int | None = None) -> list[Estimate]:
    """Estimates of all valid layouts: those that fit by step time, then the others by the memory that they need.

    On several slices, those whose sp and tp stay inside one come first.
    """
    count = slice_.device_count if device_count is None else device_count
    estimates = [estimate(work, sizes, slice_) for sizes in valid_layouts(work, count)]
    return sorted(
        estimates,
        key=lambda e: (
            not e.fits,
            not e.stays_in_slices,
            e.step_seconds if e.fits else e.memory.total,
            e.sent_bytes,
        ),
    )


def best_layout(works: Iterable[Workload], slice_: Slice, device_count: int | None = None) -> tuple[Workload, Estimate]:
    """The workload and layout of the least time for a row; first those that fit. `works`: a step with different numbers
    of rows in a call."""
    ranked = [(work, rank_layouts(work, slice_, device_count)[0]) for work in works]
    return min(
        ranked, key=lambda pair: (not pair[1].fits, pair[1].row_seconds if pair[1].fits else pair[1].memory.total)
    )


def valid_layouts(work: Workload, device_count: int) -> list[MeshSizes]:
    """Meshes that use all devices, with dp no larger than the batch and heads and columns divided evenly."""
    split = [matrix for stack in work.stacks for matrix in stack.matrices if matrix.kind != "gather"]
    columns = [matrix.shape[0 if matrix.kind == "column" else 1] for matrix in split]
    layouts = []
    for dp in _divisors(math.gcd(work.batch, device_count)):
        for tp in _divisors(device_count // dp):
            if work.heads % tp == 0 and all(size % tp == 0 for size in columns):
                layouts.append(MeshSizes(dp=dp, sp=device_count // dp // tp, tp=tp))
    return layouts


def estimate(work: Workload, sizes: MeshSizes, slice_: Slice) -> Estimate:
    chip, share = slice_.chip, _Share(work, sizes)
    memory = Memory(
        weights=_weight_bytes(work, sizes),
        prompt=_prompt_bytes(share),
        latents=2 * work.history * (work.video_latent_bytes or work.latent_bytes),
        temporaries=round(chip.temporaries * _temporaries(share, chip)),
    )
    matmul = 2.0 * sum(
        stack.layers * share.matrix_rows(matrix) * _products(matrix, sizes)
        for stack in work.stacks
        for matrix in stack.matrices
        if matrix.used
    )
    attention = sum(
        stack.layers * 4.0 * share.batch * share.heads * share.for_stack(stack).score_products for stack in work.stacks
    )
    memory_bytes = _memory_bytes(share)
    traffic = tuple(item for item in _traffic(share) if item.nbytes)
    return Estimate(
        sizes=sizes,
        attention=share.attention,
        memory=memory,
        matmul_flops=matmul,
        attention_flops=attention,
        memory_bytes=memory_bytes,
        traffic=traffic,
        compute_seconds=compute_seconds(matmul, attention, chip),
        memory_seconds=memory_bytes / chip.memory_bandwidth,
        interconnect_seconds=sum(
            transfer_seconds(item, slice_) for item in traffic if not crosses_slices(item, slice_, sizes)
        ),
        fits=fits(memory.total, chip),
        network_seconds=sum(
            transfer_seconds(item, slice_, sizes) for item in traffic if crosses_slices(item, slice_, sizes)
        ),
        crossing_axes=slice_.crossing_axes(sizes),
        batch=work.batch,
        calls=work.calls,
    )


def compute_seconds(matmul_flops: float, attention_flops: float, chip: Chip) -> float:
    return (matmul_flops / chip.matmul_fraction + attention_flops / chip.attention_fraction) / chip.flops


def usable_bytes(chip: Chip) -> int:
    """Memory that a step may take, with SPARE_FRACTION left free."""
    return int((1 - SPARE_FRACTION) * chip.memory_bytes)


def fits(nbytes: int, chip: Chip) -> bool:
    return nbytes <= usable_bytes(chip)


def pad_length(length: int, step: int) -> int:
    """A length as splash pads it on v6e (kernels/tuning.py): equal tiles, each counted as `_LANES` rows more, or as
    half as many again where it leaves a matrix unit half empty."""
    fewest = -(-length // _TILE)
    counts = range(fewest, fewest + min(fewest // 2, 16) + 1)
    sizes = {count: -(-length // (count * step)) * step for count in counts}
    ends = {count: _LANES + _LANES // 2 * (sizes[count] % _MATRIX_SIDE != 0) for count in counts}
    count = min(counts, key=lambda count: count * (sizes[count] + ends[count]))
    return count * sizes[count]


class _Share:
    """One device's share of a workload."""

    def __init__(self, work: Workload, sizes: MeshSizes) -> None:
        self.work, self.sizes = work, sizes
        self.batch = work.batch // sizes.dp if work.batch % sizes.dp == 0 else work.batch
        self.tokens = -(-work.tokens // sizes.sp)
        self.text_tokens = -(-work.text_tokens // sizes.sp)
        self.sequence = self.tokens + (self.text_tokens if work.text == "joint" else 0)
        """The device's share of the tokens that attend to each other."""
        self.heads = work.heads // sizes.tp
        self.attention: Literal["ulysses", "ring", "whole"] = (
            "whole" if sizes.sp == 1 else "ulysses" if self.heads % sizes.sp == 0 else "ring"
        )

    def for_stack(self, stack: Stack) -> _Share:
        """The share of the workload as the blocks of one stack see it."""
        return self if stack.reads_text else _Share(self.work.for_stack(stack), self.sizes)

    @property
    def rows(self) -> int:
        return self.batch * self.sequence

    def matrix_rows(self, matrix: Matrix) -> int:
        """The rows that a matrix multiplies on this device."""
        rows = {"tokens": self.tokens, "text": self.text_tokens, "both": self.tokens + self.text_tokens}
        return self.batch * rows.get(matrix.rows, matrix.sample_rows)

    @property
    def score_products(self) -> float:
        """Pairs of query and key for each of the device's heads, as if Ulysses did not divide heads further, times the
        features of a head: whole lanes where splash computes."""
        work, sizes = self.work, self.sizes
        in_lanes = -(-work.head_dim // _LANES) * _LANES
        if work.sequence <= work.dense_max_tokens:
            own: float = self.sequence * work.sequence * work.head_dim
        elif self.attention == "ring":
            own = sizes.sp * pad_length(self.sequence, _QUERY_STEP) * pad_length(self.sequence, _KEY_STEP) * in_lanes
        else:
            whole = self.sequence * sizes.sp
            own = pad_length(whole, _QUERY_STEP) * pad_length(whole, _KEY_STEP) / sizes.sp * in_lanes
        if work.text == "joint":
            return own
        if self.tokens * work.text_tokens <= work.dense_max_tokens**2:
            return own + self.tokens * work.text_tokens * work.head_dim
        return own + pad_length(self.tokens, _QUERY_STEP) * pad_length(work.text_tokens, _KEY_STEP) * in_lanes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one array [tokens, hidden], which tp does not split."""
        return self.rows * self.work.hidden * self.work.itemsize

    @property
    def ffn_bytes(self) -> int:
        return self.rows * self.work.ffn * self.work.itemsize // self.sizes.tp

    @property
    def head_bytes(self) -> int:
        """Bytes of the queries, keys or values outside of attention: [tokens, own heads]."""
        return self.hidden_bytes // self.sizes.tp

    @property
    def exchange_bytes(self) -> int:
        """`head_bytes` as Ulysses sends them: in whole registers of rows, where one kernel norms and rotates all heads
        (kernels/rotary_attention.py)."""
        work = self.work
        if (
            not any(stack.norms for stack in work.stacks)
            or self.sequence < _LANES
            or work.head_dim % _LANES
            or work.sequence <= work.dense_max_tokens
        ):
            return self.head_bytes
        return self.head_bytes // self.sequence * (-(-self.sequence // _REGISTER_ROWS) * _REGISTER_ROWS)


def _ways(axes: tuple[str, ...], sizes: MeshSizes) -> int:
    return math.prod(getattr(sizes, axis) for axis in axes)


def _products(matrix: Matrix, sizes: MeshSizes) -> float:
    _, compute = rule_axes(matrix.kind, matrix.shape, matrix.itemsize, sizes)
    return matrix.count * math.prod(matrix.shape) / _ways(compute, sizes)


def _prompt_bytes(share: _Share) -> int:
    work = share.work
    text = share.batch * work.text_tokens * work.hidden * work.itemsize
    return text if work.text == "joint" else 2 * work.layers * text // share.sizes.tp


def _weight_bytes(work: Workload, sizes: MeshSizes) -> int:
    total = work.small_bytes
    for times, matrix in work.matrices:
        rest, _ = rule_axes(matrix.kind, matrix.shape, matrix.itemsize, sizes)
        total += times * matrix.nbytes // _ways(rest, sizes)
    return total * work.models


def _temporaries(share: _Share, chip: Chip) -> float:
    work = share.work
    embedding = _LIVE_EMBEDDING * share.hidden_bytes
    block = _LIVE_HIDDEN * share.hidden_bytes + _LIVE_FFN * share.ffn_bytes
    if share.attention == "ring":
        block += _LIVE_RING * share.head_bytes
    if share.attention == "ulysses" and chip.overlaps_gathers:
        block += _LIVE_EXCHANGE * share.head_bytes
    stacked = tuple(matrix for stack in work.stacks for matrix in stack.matrices)
    # While one weight of a block is multiplied, the next one arrives.
    gathered = _largest_gathered(stacked, share, 2 if chip.overlaps_gathers else 1)
    return max(embedding + _largest_gathered(work.outer, share, 1), block + gathered)


def _largest_gathered(matrices: tuple[Matrix, ...], share: _Share, count: int) -> int:
    """Bytes of the `count` largest weights that are gathered."""
    found: list[int] = []
    for matrix in matrices:
        rest, compute = rule_axes(matrix.kind, matrix.shape, matrix.itemsize, share.sizes)
        if matrix.used and _ways(rest, share.sizes) > _ways(compute, share.sizes):
            found += matrix.count * [matrix.nbytes // _ways(compute, share.sizes)]
    return sum(sorted(found, reverse=True)[:count])


def _memory_bytes(share: _Share) -> float:
    work, sizes = share.work, share.sizes
    stacked = [(stack.layers, matrix) for stack in work.stacks for matrix in stack.matrices if matrix.used]
    weights = sum(layers * matrix.count * matrix.nbytes for layers, matrix in stacked) / sizes.tp
    if sizes.sp > 1:
        weights *= 2  # written by the gather, read by the product
    return weights + sum(stack.layers * _layer_bytes(share.for_stack(stack)) for stack in work.stacks)


def _layer_bytes(share: _Share) -> float:
    """Bytes of activations that a block reads and writes."""
    work, sizes = share.work, share.sizes
    activations = _PASSES_HIDDEN * share.hidden_bytes + _PASSES_FFN * share.ffn_bytes
    queries = work.sequence if share.attention != "ring" else share.sequence
    heads = share.heads / sizes.sp if share.attention == "ulysses" else share.heads
    pairs = 2 * share.batch * heads * work.sequence * work.head_dim * work.itemsize
    return activations + math.ceil(queries / _TILE) * pairs


def _traffic(share: _Share) -> list[Traffic]:
    work, sizes = share.work, share.sizes
    found = []

    def add(cause: Cause, kind: Kind, axes: tuple[str, ...], count: int, nbytes: int) -> None:
        group = _ways(axes, sizes)
        found.append(Traffic(cause, kind, axes, group, count, count * sent_bytes(kind, group, nbytes)))

    for stack in work.stacks:
        own = share.for_stack(stack)
        if share.attention == "ulysses":
            add("sequence exchange (Ulysses)", "all-to-all", ("sp",), 4 * stack.layers, own.exchange_bytes)
        if share.attention == "ring":
            count = 2 * (sizes.sp - 1) * stack.layers
            add("keys and values around the ring", "collective-permute", ("sp",), count, own.head_bytes)
        add("norm over columns (tp)", "all-reduce", ("tp",), stack.norms * stack.layers, own.rows * 4)
    for times, matrix in work.matrices:
        rest, compute = rule_axes(matrix.kind, matrix.shape, matrix.itemsize, sizes)
        missing = tuple(axis for axis in rest if axis not in compute)
        if matrix.used:
            add("weight gather", "all-gather", missing, times, matrix.nbytes // _ways(compute, sizes))
            answer = share.matrix_rows(matrix) * matrix.shape[0] * work.itemsize
            if matrix.kind == "row":
                add("sum over columns (tp)", "all-reduce", ("tp",), times, answer)
            if matrix.kind == "column" and matrix.rows == "samples":
                add("modulation gather", "all-gather", ("tp",), times, answer)
    answer = share.batch * share.tokens * sizes.sp * work.output_features * work.itemsize
    add("prediction gather", "all-gather", ("sp",), 1, answer)
    # Latents to both branches, and the guided answer back to all: three times a sample.
    add("guidance branches", "collective-permute", ("dp",), 2, work.latent_bytes)
    add("guidance branches", "all-reduce", ("dp",), 1, work.latent_bytes)
    return _merge([item for item in found if item.group > 1])


def _merge(items: list[Traffic]) -> list[Traffic]:
    """One entry for each cause, kind and axes."""
    merged: dict[tuple[str, Kind, tuple[str, ...]], Traffic] = {}
    for item in items:
        key = (item.cause, item.kind, item.axes)
        known = merged.get(key)
        merged[key] = (
            item
            if known is None
            else dataclasses.replace(known, count=known.count + item.count, nbytes=known.nbytes + item.nbytes)
        )
    return list(merged.values())


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
