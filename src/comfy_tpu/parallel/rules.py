"""Sharding rules as data: which weights are split over which mesh axes, in storage and while they compute.

A rule is a case-sensitive glob on weight names (`*` spans dots) and what to do with what it matches. Every weight
matches exactly one rule. The weights of scanned layers appear as one stacked weight, named with `*` in place of the
layer index ("blocks.*.attn1.to_q.weight"); rules are written for the shape of one layer, and the leading layer
dimension is never split.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from comfy_tpu.config import MeshSizes, ShardingConfig
from comfy_tpu.errors import ShardingError, join_names, see
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.report import ShardingReport, make_report

_LARGEST_TP_SUGGESTED = 64
_join = functools.partial(join_names, before_rest=", ")

RuleKind = Literal["column", "row", "gather", "replicate"]

# The dimension of one layer's weight that tp splits. torch stores a Linear as (out, in).
_TP_DIMENSION: Mapping[RuleKind, int] = {"column": 0, "row": 1}


@dataclasses.dataclass(frozen=True)
class Rule:
    kind: RuleKind
    pattern: str

    def __str__(self) -> str:
        return f"{self.kind}({self.pattern!r})"


def column(pattern: str) -> Rule:
    """Output features over tp: dimension 0 of a weight and of its bias."""
    return Rule("column", pattern)


def row(pattern: str) -> Rule:
    """Input features over tp: dimension 1. The bias of such a layer is added once, after the sum: replicate it."""
    return Rule("row", pattern)


def gather(pattern: str) -> Rule:
    """Stored in pieces over sp and tp, whole while it computes (FSDP)."""
    return Rule("gather", pattern)


def replicate(pattern: str) -> Rule:
    """Whole on every device."""
    return Rule("replicate", pattern)


def covers(rules: Sequence[Rule], weights: Mapping[str, ShapeDtype], tp: int) -> bool:
    """Whether every weight (of one layer) matches exactly one rule, and tp divides the dimension that it splits."""
    for name, weight in weights.items():
        matching = [rule for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)]
        if len(matching) != 1:
            return False
        dimension = _TP_DIMENSION.get(matching[0].kind)
        if dimension is not None and (dimension >= len(weight.shape) or weight.shape[dimension] % tp):
            return False
    return True


class ShapeDtype(Protocol):
    """An array, or a jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class WeightSharding:
    name: str
    rule: Rule
    nbytes: int
    storage: PartitionSpec
    compute: PartitionSpec
    could_not_split: bool
    """Whether a rule would split the weight but no axis divides it."""


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    placement: Placement
    entries: Mapping[str, WeightSharding]

    def storage(self, name: str) -> NamedSharding:
        """The sharding of a weight in storage, between its uses."""
        return NamedSharding(self.placement.mesh, self._entry(name).storage)

    def compute(self, name: str) -> NamedSharding:
        """The sharding of a weight while its layer computes."""
        return NamedSharding(self.placement.mesh, self._entry(name).compute)

    def report(self) -> ShardingReport:
        return make_report(self.placement.sizes, self.entries.values())

    def _entry(self, name: str) -> WeightSharding:
        if name not in self.entries:
            raise ShardingError(f"no weight {name!r} in this plan; it has {_join(self.entries)}")
        return self.entries[name]


def plan_shardings(
    rules: Sequence[Rule],
    weights: Mapping[str, ShapeDtype],
    placement: Placement,
    stacked: Collection[str] = (),
    *,
    config: ShardingConfig | None = None,
) -> ShardingPlan:
    """Two partition specs for every weight. `stacked` names those with a leading layer dimension."""
    config = config or ShardingConfig()
    unknown = [name for name in stacked if name not in weights]
    if unknown:
        raise ShardingError(f"stacked names that are not weights: {_join(unknown)}; weights are {_join(weights)}")
    matched = _match(rules, weights)
    shapes = {name: _layer_shape(name, weights[name].shape, name in stacked) for name in weights}
    _check_tensor_parallel(matched, shapes, placement.sizes.tp)
    entries = {}
    for name, rule in matched.items():
        itemsize = np.dtype(weights[name].dtype).itemsize
        compute = _compute_spec(rule, shapes[name], placement.sizes.tp)
        storage, could_not_split = _storage_spec(rule, shapes[name], compute, placement.sizes, itemsize, config)
        lead = (None,) if name in stacked else ()
        entries[name] = WeightSharding(
            name=name,
            rule=rule,
            nbytes=math.prod(weights[name].shape) * itemsize,
            storage=_spec(lead + storage),
            compute=_spec(lead + compute),
            could_not_split=could_not_split,
        )
    return ShardingPlan(placement, entries)


def rule_axes(
    kind: RuleKind, shape: tuple[int, ...], itemsize: int, sizes: MeshSizes, config: ShardingConfig | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that split a weight in storage, and those that split it while it computes."""
    rule = Rule(kind, "*")
    compute = _compute_spec(rule, shape, sizes.tp)
    storage, _ = _storage_spec(rule, shape, compute, sizes, itemsize, config or ShardingConfig())
    return _axes(storage), _axes(compute)


# One entry per dimension of a layer's weight: the mesh axes that split it.
_Entry = str | tuple[str, ...] | None


def _axes(entries: tuple[_Entry, ...]) -> tuple[str, ...]:
    return tuple(axis for entry in entries if entry for axis in ((entry,) if isinstance(entry, str) else entry))


def _match(rules: Sequence[Rule], names: Iterable[str]) -> dict[str, Rule]:
    matches = {name: [rule for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)] for name in names}
    problems = []
    unmatched = [name for name, found in matches.items() if not found]
    if unmatched:
        problems.append(
            f"no rule matches {_join(unmatched)}; add a rule for each (replicate(...) keeps a weight whole on every "
            f"device). The rules are {', '.join(map(str, rules)) or 'none'}"
        )
    twice = [f"{name} ({' and '.join(map(str, found))})" for name, found in matches.items() if len(found) > 1]
    if twice:
        problems.append(f"more than one rule matches {_join(twice)}; narrow the patterns until one is left for each")
    idle = [str(rule) for rule in rules if not any(rule in found for found in matches.values())]
    if idle:
        problems.append(
            f"rules that match no weight: {_join(idle)}; correct or remove them. Weights are {_join(names)}"
        )
    if problems:
        raise ShardingError("\n".join(problems) + see("no-sharding-rule"), has_lines=True)
    return {name: found[0] for name, found in matches.items()}


def _layer_shape(name: str, shape: Sequence[int], stacked: bool) -> tuple[int, ...]:
    if stacked and not shape:
        raise ShardingError(f"{name}: is said to be stacked but has no dimension; stacked weights lead with layers")
    return tuple(shape[1:] if stacked else shape)


def _check_tensor_parallel(rules: Mapping[str, Rule], shapes: Mapping[str, tuple[int, ...]], tp: int) -> None:
    split = {}
    for name, rule in rules.items():
        if rule.kind in _TP_DIMENSION:
            dimension = _TP_DIMENSION[rule.kind]
            if len(shapes[name]) <= dimension:
                raise ShardingError(
                    f"{name}: {rule} splits dimension {dimension}, but a layer's weight has shape {shapes[name]}; "
                    f"use {'column or replicate' if rule.kind == 'row' else 'replicate'} for it"
                )
            split[name] = (dimension, shapes[name][dimension])
    uneven = [
        f"{name}: dimension {dim} is {size}, not divisible by tp={tp}"
        for name, (dim, size) in split.items()
        if size % tp
    ]
    if uneven:
        choices = _divisors([size for _, size in split.values()])
        raise ShardingError(f"{join_names(uneven, separator='; ', before_rest='; ')}; choose tp from {choices}")


def _divisors(sizes: Iterable[int]) -> str:
    common = math.gcd(*sizes)
    found = [str(n) for n in range(1, min(common, _LARGEST_TP_SUGGESTED) + 1) if common % n == 0]
    return ", ".join(found) + (", ..." if common > _LARGEST_TP_SUGGESTED else "")


def _compute_spec(rule: Rule, shape: tuple[int, ...], tp: int) -> tuple[_Entry, ...]:
    if tp == 1 or rule.kind not in _TP_DIMENSION:
        return (None,) * len(shape)
    return tuple("tp" if dimension == _TP_DIMENSION[rule.kind] else None for dimension in range(len(shape)))


def _storage_spec(
    rule: Rule,
    shape: tuple[int, ...],
    compute: tuple[_Entry, ...],
    mesh: MeshSizes,
    itemsize: int,
    config: ShardingConfig,
) -> tuple[tuple[_Entry, ...], bool]:
    """The spec in storage, and whether the rule would split further but no axis divides."""
    too_small = len(shape) < 2 or math.prod(shape) * itemsize < config.gather_min_bytes
    if rule.kind == "replicate" or too_small:
        return compute, False
    sizes = {"sp": mesh.sp, "tp": mesh.tp}
    if rule.kind == "gather":
        # Together on one dimension if possible; else the larger axis alone, which saves more.
        choices = [("sp", "tp"), *sorted((("sp",), ("tp",)), key=lambda axes: -sizes[axes[0]])]
    else:
        choices = [("sp",)]
    wanted = False
    for choice in choices:
        axes = tuple(axis for axis in choice if sizes[axis] > 1)
        if not axes:
            continue
        wanted = True
        ways = math.prod(sizes[axis] for axis in axes)
        free = [dim for dim, entry in enumerate(compute) if entry is None and shape[dim] % ways == 0 and shape[dim]]
        if free:
            # The largest: splitting a short one leaves pieces smaller than a tile of the device's memory.
            best = max(free, key=lambda dim: shape[dim])
            entry = axes[0] if len(axes) == 1 else axes
            return (*compute[:best], entry, *compute[best + 1 :]), False
    return compute, wanted


def _spec(entries: tuple[_Entry, ...]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)
