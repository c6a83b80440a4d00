"""Bytes that chips send each other, by kind and by cause: the same measure for formulas and for compiled programs."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import Slice

Kind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Cause = Literal[
    "sequence exchange (Ulysses)",
    "keys and values around the ring",
    "sum over columns (tp)",
    "norm over columns (tp)",
    "weight gather",
    "modulation gather",
    "text gather",
    "patch embedding",
    "prediction gather",
    "guidance branches",
]
UNEXPLAINED = "unexplained"

# Of the nominal speed of the links: what gathers around a ring reached on v5e (docs/plan.md). A collective also costs
# this much before its first byte: an assumption.
_LINK_FRACTION = 0.855
_LATENCY = 5e-6
# The same over the data centre's network: assumptions, too.
_NETWORK_FRACTION = 0.8
_NETWORK_LATENCY = 1e-4


@dataclasses.dataclass(frozen=True)
class Traffic:
    cause: str
    """A Cause, or UNEXPLAINED."""
    kind: Kind
    axes: tuple[str, ...]
    group: int
    """The number of devices in a group."""
    count: int
    """Collectives in one step."""
    nbytes: int
    """Bytes sent by one device in one step."""
    detail: str = ""
    """The operation's name in the traced program."""


def sent_bytes(kind: Kind, group: int, nbytes: int) -> int:
    """Bytes that a device sends around a ring; `nbytes` is the size of a gather's result, else of the operand."""
    if group == 1:
        return 0
    share = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1.0}.get(kind, (group - 1) / group)
    return round(share * nbytes)


def crosses_slices(traffic: Traffic, slice_: Slice, sizes: MeshSizes) -> bool:
    """Whether a collective goes over the data centre's network."""
    crossing = slice_.crossing_axes(sizes)
    return any(axis in crossing for axis in traffic.axes)


def transfer_seconds(traffic: Traffic, slice_: Slice, sizes: MeshSizes | None = None) -> float:
    """Seconds over one axis of the interconnect, in both directions at once; or, of a collective that crosses slices,
    over the data centre's network, as if every byte went there.

    Without sizes, it stays in its slice. An all-to-all crosses several links: a quarter of the ring's length on
    average.
    """
    if sizes is not None and crosses_slices(traffic, slice_, sizes):
        return traffic.nbytes / (slice_.chip.network_bandwidth * _NETWORK_FRACTION) + traffic.count * _NETWORK_LATENCY
    hops = max(1.0, min(traffic.group, slice_.longest_side) / 4) if traffic.kind == "all-to-all" else 1.0
    speed = 2 * slice_.chip.link_bandwidth * _LINK_FRACTION
    return traffic.nbytes * hops / speed + traffic.count * _LATENCY
