"""Records of a running model: operators called, lines reached, masks of attention, changes of dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from comfy_tpu.bridge.catalogue import Row, find_row
from comfy_tpu.bridge.compat import replace_attribute
from comfy_tpu.bridge.environment import DeviceTensor, TraceEnvironment
from comfy_tpu.bridge.model_source import calling_place
from comfy_tpu.errors import MissingOperatorError

Place = tuple[str, int, str]


@dataclasses.dataclass
class Record:
    """What a trace dispatched."""

    rows: set[Row] = dataclasses.field(default_factory=set)
    missing: dict[str, Place | None] = dataclasses.field(default_factory=dict)
    """Operators that nobody implements, each with the first line that called it."""
    widened: dict[int, tuple[Any, Place]] = dataclasses.field(default_factory=dict)
    """Tensors in float32 by their id, each with the line where its values left bfloat16."""
    traced: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Every tensor of the trace by its id: held here, so that no later one has the same."""
    kept: list[Place] = dataclasses.field(default_factory=list)
    """The lines that used a tensor of an earlier trace."""


@contextlib.contextmanager
def recorded_dispatch(earlier: Record | None = None) -> Iterator[Record]:
    """Records every trace in the block. A missing operator does not end a trace: its results are zeros."""
    record = Record()
    past = {} if earlier is None else earlier.traced
    dispatch = TraceEnvironment.dispatch

    def record_dispatch(self: TraceEnvironment, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        place = calling_place() if any(id(leaf) in past for leaf in leaves) else None
        if place is not None and place not in record.kept:
            record.kept.append(place)
        try:
            result = dispatch(self, func, types, args, kwargs)
        except MissingOperatorError:
            if not isinstance(func, torch._ops.OpOverload):
                raise  # torch tries the operators that it is made of
            record.missing.setdefault(str(func), calling_place())
            return _zero_results(self, func, args, kwargs or {})
        row = find_row(func)
        on_device = {id(leaf): leaf for leaf in (*leaves, *tree_leaves(result)) if isinstance(leaf, DeviceTensor)}
        # What a model computes on the host while it is traced comes this way too, and stays torch's.
        if row and on_device:
            record.rows.add(row)
        record.traced |= on_device
        _record_widening(record, leaves, result)
        return result

    with replace_attribute(TraceEnvironment, "dispatch", record_dispatch):
        yield record


@contextlib.contextmanager
def values_in_text() -> Iterator[None]:
    """An f-string may hold a tensor's value, as in torch; torch itself allows it for its own class only."""
    original = torch.Tensor.__format__

    def formatted(tensor: torch.Tensor, specification: str) -> str:
        has_value = isinstance(tensor, DeviceTensor) and tensor.dim() == 0
        return format(tensor.item(), specification) if has_value else original(tensor, specification)

    with replace_attribute(torch.Tensor, "__format__", formatted):
        yield


def _zero_results(environment: TraceEnvironment, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        described = func(*tree_map_only(torch.Tensor, to_meta, args), **tree_map_only(torch.Tensor, to_meta, kwargs))
        made = tree_map_only(torch.Tensor, lambda each: torch.zeros(each.shape, dtype=each.dtype), described)
    return environment.as_torch(environment.t2j_copy(made))


def _record_widening(record: Record, leaves: list[Any], result: Any) -> None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    origin = next((record.widened[id(leaf)][1] for leaf in tensors if id(leaf) in record.widened), None)
    if origin is None and not any(leaf.dtype is torch.bfloat16 for leaf in tensors):
        return
    for leaf in tree_leaves(result):
        if isinstance(leaf, DeviceTensor) and leaf.dtype is torch.float32 and id(leaf) not in record.widened:  # type: ignore[attr-defined]
            place = origin or calling_place()
            if place is not None:
                record.widened[id(leaf)] = (leaf, place)


class EagerRun(TorchFunctionMode):
    """Places that a run in PyTorch shows."""

    def __init__(self) -> None:
        super().__init__()
        self.square: list[Place] = []
        """Calls of attention with a mask that has a row for every query."""
        self.kept: list[Place] = []
        """Uses of a tensor that a trace left behind."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs))):
            place = calling_place()
            if place is not None and place not in self.kept:
                self.kept.append(place)
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            query = kwargs.get("query", args[0] if args else None)
            if isinstance(mask, torch.Tensor) and mask.ndim >= 2 and query is not None:
                own_rows = mask.shape[-2] == query.shape[-2] > 1 and mask.shape[-1] > 1
                place = calling_place()
                if own_rows and not _rows_are_equal(mask) and place is not None and place not in self.square:
                    self.square.append(place)
        return func(*args, **kwargs)


def _rows_are_equal(mask: torch.Tensor) -> bool:
    return mask.stride(-2) == 0


@contextlib.contextmanager
def lines_reached(files: Set[str]) -> Iterator[set[tuple[str, int]]]:
    """The lines of these files that run in the block."""
    reached: set[tuple[str, int]] = set()

    def within(frame: types.FrameType, event: str, argument: Any) -> Any:
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return within

    def entering(frame: types.FrameType, event: str, argument: Any) -> Any:
        return within(frame, event, argument) if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(entering)
    try:
        yield reached
    finally:
        sys.settrace(before)
