"""Every operator that a trace knows, and how it becomes JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket

from comfy_tpu.bridge.aliasing import RECIPES
from comfy_tpu.bridge.compat import load_torchax
from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.operators import OPERATORS

Function = Callable[..., Any]
Kind = Literal["override", "view", "lowering", "decomposition"]


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    name: str
    kind: Kind

    @property
    def is_aten(self) -> bool:
        return self.name.startswith("aten.")


def count_torchax_operators() -> tuple[int, int]:
    """The number of ATen operators that torchax lowers, and of those for which it only has a decomposition."""
    torchax = load_torchax()
    lowered = {_name(_packet(function)) for function in torchax.ops.ops_registry.all_aten_ops}
    decomposed = {_name(_packet(function)) for function in torchax.decompositions.DECOMPOSITIONS}
    lowerings, decompositions = (
        sum(name.startswith("aten.") for name in names) for names in (lowered, decomposed - lowered)
    )
    return lowerings, decompositions


def find_row(function: Function) -> Row | None:
    """How a trace implements a torch function; None if torch breaks the function down into other operators."""
    packet = _packet(function)
    known = environment()
    if function in OPERATORS or packet in OPERATORS:
        return Row(_name(packet), "override")
    if packet in RECIPES:
        return Row(_name(packet), "view")
    if function in known._ops or packet in known._ops:
        return Row(_name(packet), "lowering")
    if function in known._decomps or packet in known._decomps:
        return Row(_name(packet), "decomposition")
    return None


def overloads() -> dict[Row, list[str]]:
    """Every row, sorted by name, with the overloads that it implements; an empty list means all overloads."""
    known = environment()
    found: dict[Row, set[str]] = {}
    whole = set()
    for function in (*known._ops, *known._decomps, *RECIPES):
        row = find_row(function)
        assert row is not None
        found.setdefault(row, set()).update(_overload(function))
        if not isinstance(function, OpOverload):
            whole.add(row)
    return {row: [] if row in whole else sorted(found[row]) for row in sorted(found)}


def _packet(function: Function) -> Function:
    return function.overloadpacket if isinstance(function, OpOverload) else function


def _overload(function: Function) -> Iterator[str]:
    if isinstance(function, OpOverload):
        yield function._overloadname


def _name(function: Function) -> str:
    if isinstance(function, OpOverloadPacket):
        return str(function)
    return torch.overrides.resolve_name(function) or f"{function.__module__}.{function.__qualname__}"
