"""Records of a running model: operators called, lines run, masks of attention, changes of dtype."""

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
"""File, line and function."""


@dataclasses.dataclass
class TraceRecord:
    """The operators and tensors of a trace."""

    rows: set[Row] = dataclasses.field(default_factory=set)
    missing: dict[str, Place | None] = dataclasses.field(default_factory=dict)
    """Operators that nobody implements, each with the first line that called it."""
    float32_origins: dict[int, tuple[Any, Place]] = dataclasses.field(default_factory=dict)
    """Tensors in float32 by their id, each with the line where its values left bfloat16."""
    tensors: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Every tensor of the trace by its id: held here, so that no later one has the same."""
    stale_uses: dict[Place, None] = dataclasses.field(default_factory=dict)
    """The lines that used a tensor of an earlier trace, in their order."""


@contextlib.contextmanager
def record_dispatch(earlier: TraceRecord | None = None) -> Iterator[TraceRecord]:
    """Records every trace in the block. A missing operator does not end a trace: its results are zeros."""
    record = TraceRecord()
    past = {} if earlier is None else earlier.tensors
    dispatch = TraceEnvironment.dispatch

    def dispatch_and_record(self: TraceEnvironment, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(id(leaf) in past for leaf in leaves) and (place := calling_place()):
            record.stale_uses[place] = None
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
        record.tensors |= on_device
        _record_widening(record, leaves, result)
        return result

    with replace_attribute(TraceEnvironment, "dispatch", dispatch_and_record):
        yield record


@contextlib.contextmanager
def format_device_tensors() -> Iterator[None]:
    """An f-string may hold a tensor's value, as in torch; torch itself allows it for its own class only."""
    original = torch.Tensor.__format__

    def format_tensor(tensor: torch.Tensor, specification: str) -> str:
        has_value = isinstance(tensor, DeviceTensor) and tensor.dim() == 0
        return format(tensor.item(), specification) if has_value else original(tensor, specification)

    with replace_attribute(torch.Tensor, "__format__", format_tensor):
        yield


def _zero_results(environment: TraceEnvironment, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        described = func(*tree_map_only(torch.Tensor, to_meta, args), **tree_map_only(torch.Tensor, to_meta, kwargs))
        zeros = tree_map_only(torch.Tensor, lambda each: torch.zeros(each.shape, dtype=each.dtype), described)
    return environment.as_torch(environment.t2j_copy(zeros))


def _record_widening(record: TraceRecord, leaves: list[Any], result: Any) -> None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    origins = record.float32_origins
    origin = next((origins[id(leaf)][1] for leaf in tensors if id(leaf) in origins), None)
    if origin is None and not any(leaf.dtype is torch.bfloat16 for leaf in tensors):
        return
    for leaf in tree_leaves(result):
        if isinstance(leaf, DeviceTensor) and leaf.dtype is torch.float32 and id(leaf) not in origins:  # type: ignore[attr-defined]
            place = origin or calling_place()
            if place is not None:
                origins[id(leaf)] = (leaf, place)


class EagerRecord(TorchFunctionMode):
    """Lines that a run in PyTorch shows, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.square_masks: dict[Place, None] = {}
        """Calls of attention with a mask that has a row for every query."""
        self.stale_uses: dict[Place, None] = {}
        """Uses of a tensor that a trace left behind."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs))) and (place := calling_place()):
            self.stale_uses[place] = None
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        if is_attention and _has_square_mask(*args, **kwargs) and (place := calling_place()):
            self.square_masks[place] = None
        return func(*args, **kwargs)


def _has_square_mask(
    query: torch.Tensor, key: Any, value: Any, attn_mask: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> bool:
    if attn_mask is None or attn_mask.ndim < 2:
        return False
    has_rows = attn_mask.shape[-2] == query.shape[-2] > 1 and attn_mask.shape[-1] > 1
    return has_rows and attn_mask.stride(-2) != 0  # a stride of 0: all rows are the same one


@contextlib.contextmanager
def record_lines(files: Set[str]) -> Iterator[set[tuple[str, int]]]:
    """The lines of these files that run in the block."""
    lines: set[tuple[str, int]] = set()

    def trace_line(frame: types.FrameType, event: str, argument: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_line

    def trace_call(frame: types.FrameType, event: str, argument: Any) -> Any:
        return trace_line(frame, event, argument) if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield lines
    finally:
        sys.settrace(before)
