"""Equal blocks of a module that nobody described, found by looking and run as a scan where that is the same.

A family says which of its lists are uniform and what they carry (`stacking`). A module of somebody else's says
nothing, so its lists are compared block by block, and while its forward is traced the loop is watched: if every block
gets what the block before it returned, and nothing else that differs, and nobody keeps what came between, then all of
them are one `lax.scan`. Otherwise they are run one after the other, from the same stacked weights. That is decided
anew in every trace: an option of the model may put something between two blocks.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from comfy_tpu.bridge import run_layer, run_layers
from comfy_tpu.compiler.stacking import StackedBlocks, block_difference

logger = logging.getLogger(__name__)

CARRY_AXES = ("dp", "sp", None)
"""Of [batch, tokens, features], between blocks."""

SMALLEST_RUN = 2


class BlockRun(StackedBlocks):
    """Consecutive equal blocks of a list, from `start` on."""

    def __init__(self, list_path: str, start: int, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__(blocks)
        self.list_path = list_path
        self.start = start
        self.watch: _Watch | None = None
        self.carry: tuple[str, ...] | None = None
        """What the blocks pass on, if they are to be scanned."""
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
        if self.watch is not None:
            return self.watch.call(position, args, kwargs)
        if self.carry is None:
            return run_layer(self.template, position, args, kwargs, path=self.path)
        bound = inspect.signature(self.template.forward).bind(*args, **kwargs)
        if position:  # the first call ran them all
            passed = tuple(bound.arguments[name] for name in self.carry)
            return passed if self.returns_tuple else passed[0]
        return run_layers(self.template, bound, self.carry, count=self.count, carry_axes=CARRY_AXES, path=self.path)


class _Block:
    """One place of a run, as the model's own loop meets it."""

    def __init__(self, run: BlockRun, position: int) -> None:
        self._run = run
        self._position = position

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self._position, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.template, name)


class UniformList(torch.nn.Module):
    """Stands for a `ModuleList`: runs of equal blocks are one module each, the others are as they were."""

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
    """Replaces every `ModuleList` of a skeleton that has equal neighbours. The outermost lists only."""
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
            if index - start >= SMALLEST_RUN and _has_weights(blocks[start]):
                runs.append((start, index))
            start = index
    return runs


def _has_weights(block: torch.nn.Module) -> bool:
    return any(True for _ in block.parameters())


def run_watched(module: torch.nn.Module, function: Callable[[], Any]) -> Any:
    """`function()`, with every run of the module scanned that may be. Inside a trace.

    The function is run twice. The first time blocks are watched, and only the first of a run computes; what that run
    computes is used by nobody, and the compiler drops it.
    """
    runs = [part for part in module.modules() if isinstance(part, BlockRun)]
    if not runs:
        return function()
    for run in runs:
        run.watch, run.carry = _Watch(run), None
    try:
        function()
    finally:
        watches = [(run, run.watch) for run in runs]
        for run in runs:
            run.watch = None
    for run, watch in watches:
        assert watch is not None
        run.carry, run.returns_tuple = watch.verdict(), watch.returns_tuple
    return function()


class _Watch:
    """Follows what one pass through the model's loop hands from block to block."""

    def __init__(self, run: BlockRun) -> None:
        self._run = run
        self._signature = inspect.signature(run.template.forward)
        self._calls = 0
        self._first: dict[str, Any] = {}
        self._fixed: dict[str, Any] = {}
        self._outputs: tuple[Any, ...] = ()
        self._older: list[weakref.ref[Any]] = []
        self._carry: tuple[str, ...] | None = None
        self._problem = ""
        self.returns_tuple = False

    def call(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        if position != self._calls:
            self._note(f"block {position} is called where block {self._calls} was expected")
        self._calls += 1
        if not position:
            outputs = run_layer(self._run.template, 0, args, kwargs, path=self._run.path)
            self.returns_tuple = isinstance(outputs, tuple)
            self._first = arguments
            return self._hand_out(outputs if self.returns_tuple else (outputs,))
        self._compare(position, arguments)
        del arguments, args, kwargs
        return self._hand_out(tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in self._outputs))

    def verdict(self) -> tuple[str, ...] | None:
        """What the blocks carry, or None if they are not to be scanned."""
        if not self._problem and self._calls != self._run.count:
            self._note(f"{self._calls} of {self._run.count} blocks were called")
        if self._problem:
            logger.info("%s is not run as a scan: %s", self._run.path, self._problem)
            return None
        return self._carry

    def _hand_out(self, outputs: tuple[Any, ...]) -> Any:
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            self._note("a block returns something other than tensors")
        older, self._older = self._older, [weakref.ref(x) for x in self._outputs if isinstance(x, torch.Tensor)]
        self._outputs = outputs
        if any(reference() is not None for reference in older):
            self._note("what a block returned is kept beyond the next block")
        return outputs if self.returns_tuple else outputs[0]

    def _compare(self, position: int, arguments: dict[str, Any]) -> None:
        carried = {
            name: index
            for name, value in arguments.items()
            for index, output in enumerate(self._outputs)
            if value is output
        }
        carry = tuple(sorted(carried, key=lambda name: carried[name]))
        if position == 1:
            self._carry = carry
            self._fixed = {name: value for name, value in self._first.items() if name not in carried}
            self._check_carry(carried)
            self._first = {}
        if carry != self._carry:
            self._note(f"block {position} gets other results of the block before than block 1 did")
        rest = {name: value for name, value in arguments.items() if name not in carried}
        if rest.keys() != self._fixed.keys() or not all(_same(rest[name], self._fixed[name]) for name in rest):
            self._note(f"block {position} gets other arguments than the first")

    def _check_carry(self, carried: dict[str, int]) -> None:
        if sorted(carried.values()) != list(range(len(self._outputs))):
            self._note("not everything that a block returns goes to the next one, once")
            return
        for name, index in carried.items():
            before, after = self._first.get(name), self._outputs[index]
            alike = isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (after.shape, after.dtype)
            if not alike:
                self._note(f"{name} has another shape or dtype after a block than before the first")

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (int, float, str, bool, type(None))):
        return type(one) is type(other) and one == other
    if isinstance(one, (tuple, list)) and type(one) is type(other) and len(one) == len(other):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return False
