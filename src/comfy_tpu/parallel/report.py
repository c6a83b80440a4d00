"""What a sharding plan costs: as a table, in a few lines, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import join_names

if TYPE_CHECKING:  # the doctor reads reports also where jax is broken
    from jax.sharding import PartitionSpec

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

    def summary(self) -> str:
        """In one line, or in two where weights could not be split."""
        return summarize(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in (*_GROUPS, "total")}
        return {"mesh": dataclasses.asdict(self.sizes), **groups, "could_not_split": list(self.could_not_split)}


def summarize(document: Mapping[str, Any]) -> str:
    """The summary of a report from what its `as_dict` returned."""
    mesh, total = document["mesh"], document["total"]
    text = (
        f"mesh {MeshSizes(**mesh)}: {total['tensors']} tensors, {format_gb(total['nbytes'])}, "
        f"{format_gb(total['bytes_per_device'])} of it on each device"
    )
    if MeshSizes(**mesh).device_count > 1:
        words = {"sharded": "split", "gathered": "stored in pieces and gathered", "replicated": "replicated"}
        parts = [
            f"{document[name]['tensors']} {word} ({format_gb(document[name]['nbytes'])})"
            for name, word in words.items()
        ]
        text += f"; {', '.join(parts)}"
    if document["could_not_split"]:
        text += f"\ncould not be split, because no dimension divides: {join_names(document['could_not_split'])}"
    return text


def format_gb(nbytes: float) -> str:
    """Three figures, or one behind the point; in MB below a hundred."""
    if nbytes < 1e8:
        return f"{nbytes / 1e6:.3g} MB"
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e10 else f"{nbytes / 1e9:.3g} GB"


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
