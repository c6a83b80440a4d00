"""What a sharding plan costs, to read and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Protocol

from jax.sharding import PartitionSpec

from comfy_tpu.config import MeshSizes

_GROUPS = {
    "sharded": "split while computing",
    "gathered": "stored in pieces, whole while computing",
    "replicated": "whole on every device",
}


class _Planned(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def storage(self) -> PartitionSpec: ...

    @property
    def compute(self) -> PartitionSpec: ...

    @property
    def could_not_split(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class ReportGroup:
    tensors: int
    nbytes: int
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """Counts and bytes of weights by how they are stored on this mesh, whichever rule they matched."""

    sizes: MeshSizes
    sharded: ReportGroup
    gathered: ReportGroup
    replicated: ReportGroup
    could_not_split: tuple[str, ...]
    """Weights that a rule would split but that no axis divides: every device stores them as they compute."""

    @property
    def total(self) -> ReportGroup:
        groups = (self.sharded, self.gathered, self.replicated)
        return ReportGroup(
            tensors=sum(group.tensors for group in groups),
            nbytes=sum(group.nbytes for group in groups),
            bytes_per_device=sum(group.bytes_per_device for group in groups),
        )

    def __str__(self) -> str:
        lines = [f"mesh {self.sizes}", f"{'':12}{'tensors':>8}{'GB':>10}{'GB per device':>15}"]
        for name, meaning in (*_GROUPS.items(), ("total", "")):
            group: ReportGroup = getattr(self, name)
            numbers = f"{group.tensors:>8}{group.nbytes / 1e9:>10.3f}{group.bytes_per_device / 1e9:>15.3f}"
            lines.append(f"{name:12}{numbers}  {meaning}".rstrip())
        if self.could_not_split:
            lines.append(f"could not be split (no dimension divides): {', '.join(self.could_not_split)}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in (*_GROUPS, "total")}
        return {"mesh": dataclasses.asdict(self.sizes), **groups, "could_not_split": list(self.could_not_split)}


def make_report(sizes: MeshSizes, weights: Iterable[_Planned]) -> ShardingReport:
    weights = list(weights)
    members: dict[str, list[_Planned]] = {name: [] for name in _GROUPS}
    for weight in weights:
        if _ways(weight.compute, sizes) > 1:
            members["sharded"].append(weight)
        elif _ways(weight.storage, sizes) > 1:
            members["gathered"].append(weight)
        else:
            members["replicated"].append(weight)
    groups = {
        name: ReportGroup(
            tensors=len(group),
            nbytes=sum(weight.nbytes for weight in group),
            bytes_per_device=sum(weight.nbytes // _ways(weight.storage, sizes) for weight in group),
        )
        for name, group in members.items()
    }
    return ShardingReport(sizes, **groups, could_not_split=tuple(w.name for w in weights if w.could_not_split))


def _ways(spec: PartitionSpec, sizes: MeshSizes) -> int:
    axes = [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(getattr(sizes, axis) for axis in axes)
