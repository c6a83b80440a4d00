"""Detects equal blocks of a module without a family, and runs them as a scan where the result is the same.

A family declares which of its lists are uniform and what they carry (`stacking`). A foreign module declares nothing, so
its lists are compared block by block, and its loop is recorded while its forward is traced: consecutive blocks become
one `lax.scan` if each gets the results of the block before, if their other arguments are equal, and if only the next
block uses their results. The other blocks run one after the other, from the same stacked weights. Every trace decides
again: an option of the model may put other code between two blocks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.overrides

from comfy_tpu.bridge import BlockCall, run_layer, run_layers, tensor_content
from comfy_tpu.compiler.stacking import StackedBlocks, block_difference
from comfy_tpu.errors import StackingError

logger = logging.getLogger(__name__)

CARRY_AXES = ("dp", "sp", None)
"""How [batch, tokens, features] is split between blocks."""

MIN_RUN_LENGTH = 2


@dataclasses.dataclass(frozen=True)
class Segment:
    """The blocks `start` to `stop` (exclusive) of a run; each gets the results of the block before."""

    start: int
    stop: int
    carry: tuple[str | int, ...] = ()
    """The arguments that are results of the block before, in the order of the results: by name, or by position where
    the model's loop passes them so."""


class BlockRun(StackedBlocks):
    """Consecutive equal blocks of a list, from `start` on."""

    def __init__(self, list_path: str, start: int, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__(blocks)
        self.list_path = list_path
        self.start = start
        self.recorder: _LoopRecorder | None = None
        self.segments: dict[int, Segment] = {}
        """The segment of each block, by the block's position."""
        self.returns_tuple = False

    @property
    def path(self) -> str:
        return f"{self.list_path}.{self.key}"

    @property
    def key(self) -> str:
        return f"{self.start}:{self.start + self.count}"

    def block_names(self, path: str) -> tuple[str, ...]:
        return tuple(f"{self.list_path}.{self.start + index}" for index in range(self.count))

    def call(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder is not None:
            return self.recorder.call(position, args, kwargs)
        segment = self.segments[position]
        if segment.stop - segment.start == 1:
            return run_layer(self.template, position, args, kwargs, path=self.path)
        call = BlockCall(args, kwargs)
        if position > segment.start:  # the first call ran them all
            passed = tuple(call.arguments[name] for name in segment.carry)
            return passed if self.returns_tuple else passed[0]
        return run_layers(
            self.template,
            call,
            segment.carry,
            layers=range(segment.start, segment.stop),
            carry_axes=CARRY_AXES,
            path=self.path,
        )


class _Block:
    """One block of a run, as the model's own loop sees it."""

    def __init__(self, run: BlockRun, position: int) -> None:
        self._run = run
        self._position = position

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._run.template)  # what isinstance sees

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self._position, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._run.template, name)
        if isinstance(value, (torch.nn.Module, torch.Tensor)):
            raise self._refusal(name)
        return value

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal("the layers")

    def __len__(self) -> int:
        raise self._refusal("the layers")

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal(f"[{index}]")

    def _refusal(self, part: str) -> StackingError:
        return StackingError(
            f"the model uses {part} of a block of {self._run.list_path} by itself; a stack has no such part of one "
            "block: run the list as it is"
        )


class UniformList(torch.nn.Module):
    """Replaces a `ModuleList`: each run of equal blocks is one module, other blocks are unchanged."""

    def __init__(self, path: str, blocks: torch.nn.ModuleList, runs: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._places: list[tuple[str, int | None]] = [(str(index), None) for index in range(len(blocks))]
        for start, stop in runs:
            run = BlockRun(path, start, list(blocks)[start:stop])
            self.add_module(run.key, run)
            self._places[start:stop] = [(run.key, position) for position in range(stop - start)]
        for key, position in self._places:
            if position is None:
                self.add_module(key, blocks[int(key)])

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        key, position = self._places[index]
        module = self._modules[key]
        return _Block(module, position) if isinstance(module, BlockRun) and position is not None else module


def stack_uniform(module: torch.nn.Module) -> torch.nn.Module:
    """Replaces every `ModuleList` of a skeleton that has equal neighbours; of nested lists, the outermost."""
    found: list[str] = []
    for path, part in list(module.named_modules()):
        if isinstance(part, torch.nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in found):
            runs = _runs(part)
            if runs:
                found.append(path)
                parent, _, name = path.rpartition(".")
                module.get_submodule(parent)._modules[name] = UniformList(path, part, runs)
    return module


def _runs(blocks: torch.nn.ModuleList) -> list[tuple[int, int]]:
    runs, start = [], 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or block_difference(blocks[start], blocks[index], ()):
            if index - start >= MIN_RUN_LENGTH and _is_block(blocks[start]):
                runs.append((start, index))
            start = index
    return runs


def _is_block(module: torch.nn.Module) -> bool:
    """Whether a module is called as a block and has weights. Containers are not: a model calls their parts.

    A Sequential is not, either: U-Nets iterate over its layers. Lists inside of it are searched instead.
    """
    is_called = type(module).forward is not torch.nn.Module.forward and not isinstance(module, torch.nn.Sequential)
    return is_called and any(True for _ in module.parameters())


def run_with_detected_scans(
    module: torch.nn.Module, function: Callable[[], Any], varying: frozenset[str] = frozenset()
) -> Any:
    """`function()`, with equal blocks run as scans where that gives the same result. For use inside a trace.

    `varying` names entries of dictionaries among the arguments that differ between blocks but are not read by them.
    The function runs twice. The first time its loops are recorded, and only the first block of each run computes;
    nothing uses the results of that pass, so the compiler drops it.
    """
    runs = [part for part in module.modules() if isinstance(part, BlockRun)]
    if not runs:
        return function()
    uses = _UseTracker()
    for run in runs:
        run.recorder = _LoopRecorder(run, uses, varying)
    try:
        with uses:
            uses.add_results(function())
    finally:
        recorders = [(run, run.recorder) for run in runs]
        for run in runs:
            run.recorder = None
    for run, recorder in recorders:
        assert recorder is not None
        segments = recorder.segments()
        run.segments = {position: part for part in segments for position in range(part.start, part.stop)}
        run.returns_tuple = recorder.returns_tuple
        if len(segments) > 1:
            logger.debug("%s runs in %d pieces", run.path, len(segments))
    return function()


class _UseTracker(torch.overrides.TorchFunctionMode):
    """Records which of the tensors that blocks returned are used by other code than a block."""

    def __init__(self) -> None:
        super().__init__()
        self._tracked: dict[int, torch.Tensor] = {}  # by id; held, so that no other tensor takes the id
        self._used: set[int] = set()

    def track(self, tensor: Any) -> Any:
        self._tracked[id(tensor)] = tensor
        return tensor

    def was_used(self, tensor: Any) -> bool:
        return id(tensor) in self._used

    def add_results(self, results: Any) -> None:
        self._mark_used(results)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # x.shape and the like use nothing of it; x.mT does.
        if getattr(func, "__name__", "") != "__get__" or isinstance(result, torch.Tensor):
            self._mark_used((args, kwargs))
        return result

    def _mark_used(self, tree: Any) -> None:
        if isinstance(tree, torch.Tensor):
            if id(tree) in self._tracked:
                self._used.add(id(tree))
        elif isinstance(tree, dict):
            for item in tree.values():
                self._mark_used(item)
        elif isinstance(tree, (list, tuple)):
            for item in tree:
                self._mark_used(item)


@dataclasses.dataclass
class _Call:
    arguments: dict[str | int, Any]
    """The arguments, with copies of containers: a model may use one dictionary for all blocks, and write into it."""
    outputs: tuple[Any, ...]


class _LoopRecorder:
    """Records what is passed from block to block in one pass through the model's loop."""

    def __init__(self, run: BlockRun, uses: _UseTracker, varying: frozenset[str]) -> None:
        self._run = run
        self._uses = uses
        self._varying = varying
        self._calls: dict[int, _Call] = {}
        self._in_order = True
        self._written: dict[str | int, Any] = {}
        """The arguments that a block wrote into."""
        self.returns_tuple = False

    def call(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = BlockCall(args, kwargs).arguments
        copied = {name: self._copy_containers(value) for name, value in arguments.items()}
        self._in_order &= all(position > earlier for earlier in self._calls)
        if not self._calls or self._writes_containers:
            made = self._run_block(position, arguments, copied, args, kwargs)
        else:
            made = next(iter(self._calls.values())).outputs
        # New tensors for each block: an argument that is one of them shows which block's result it is.
        outputs = tuple(self._uses.track(_clone_untracked(x)) if isinstance(x, torch.Tensor) else x for x in made)
        self._calls[position] = _Call(copied, outputs)
        return outputs if self.returns_tuple else outputs[0]

    @property
    def _writes_containers(self) -> bool:
        """Whether a block writes into a list or dictionary, which later code may read: then every block must run."""
        return any(not isinstance(value, torch.Tensor) for value in self._written.values())

    def _run_block(
        self,
        position: int,
        arguments: dict[str | int, Any],
        copied: dict[str | int, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        before = {name: _flatten_contents(value) for name, value in copied.items()}
        result = run_layer(self._run.template, position, args, kwargs, path=self._run.path)
        for name, value in arguments.items():
            if not _identical(before[name], _flatten_contents(self._copy_containers(value))):
                self._written[name] = self._uses.track(value)
        self.returns_tuple = isinstance(result, tuple)
        return result if isinstance(result, tuple) else (result,)

    def _copy_containers(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._copy_containers(item) for name, item in value.items() if name not in self._varying}
        return [self._copy_containers(item) for item in value] if isinstance(value, (list, tuple)) else value

    def segments(self) -> list[Segment]:
        """The segments of the run, each of which is one scan. A block that is not called ends one, and is in none."""
        single_blocks = [Segment(position, position + 1) for position in range(self._run.count)]
        if not self._in_order or not self._calls:
            return single_blocks
        first, *others = self._calls
        found = [Segment(first, first + 1)]
        for position in others:
            last, carry = found[-1], self._link(position) if position - 1 in self._calls else ()
            if carry and (last.stop - last.start == 1 or carry == last.carry):
                found[-1] = Segment(last.start, position + 1, carry)
            else:
                found.append(Segment(position, position + 1))
        if self._written and not self._may_write(found):
            return single_blocks
        return found

    def _may_write(self, segments: list[Segment]) -> bool:
        """Whether the writes of blocks are preserved: in a scan only the next block sees what a block writes."""
        carried = {name for segment in segments for name in segment.carry}
        seen_by_others = any(self._uses.was_used(value) for value in self._written.values())
        return len(segments) == 1 and self._written.keys() <= carried and not seen_by_others

    def _link(self, position: int) -> tuple[str | int, ...]:
        """The arguments of block `position` that are the results of the block before; empty if the two cannot be in one
        scan."""
        before, call = self._calls[position - 1], self._calls[position]
        places = {id(output): index for index, output in enumerate(before.outputs)}
        carried = {name: places[id(value)] for name, value in call.arguments.items() if id(value) in places}
        if sorted(carried.values()) != list(range(len(before.outputs))):
            return ()
        if not all(isinstance(output, torch.Tensor) for output in before.outputs):
            return ()
        if any(self._uses.was_used(output) for output in before.outputs):
            return ()
        if not all(_same_type(before.arguments.get(name), before.outputs[index]) for name, index in carried.items()):
            return ()
        rest, rest_before = (
            {name: value for name, value in arguments.items() if name not in carried}
            for arguments in (call.arguments, before.arguments)
        )
        if rest.keys() != rest_before.keys() or not all(_same_value(rest[name], rest_before[name]) for name in rest):
            return ()
        return tuple(sorted(carried, key=lambda name: carried[name]))


def _clone_untracked(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # not a use by the model
        return tensor.clone()


def _same_type(before: Any, after: torch.Tensor) -> bool:
    return isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (after.shape, after.dtype)


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (int, float, str, bool, type(None))):
        return type(one) is type(other) and one == other
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_same_value(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(_same_value(one[name], other[name]) for name in one)
    return False


def _flatten_contents(tree: Any) -> list[Any]:
    """All leaves of copied arguments, each tensor followed by its content."""
    if isinstance(tree, dict):
        return [item for name, value in tree.items() for item in (name, *_flatten_contents(value))]
    if isinstance(tree, list):
        return [item for value in tree for item in _flatten_contents(value)]
    return [tree, tensor_content(tree)] if isinstance(tree, torch.Tensor) else [tree]


def _identical(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
