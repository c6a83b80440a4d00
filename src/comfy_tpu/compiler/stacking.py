"""Scan over layers: a list of equal blocks becomes one traced block over stacked weights.

The `ModuleList` in the skeleton is replaced by a `ScannedLayers` that iterates as a single module. A model's own loop
`for block in self.blocks: x = block(x, …)` then runs once, and that one call is a `lax.scan` over all layers. Wan 14B
on one H200: trace 3.1 -> 0.2 s, compile 14.8 -> 3.4 s, the step itself takes the same time.

Anything else that the loop does is done once, too: `for i, block in enumerate(self.blocks)` sees only i = 0, which
cannot be detected here. A family's tests therefore compare results with and without the scan.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.bridge import StackedLayers, fold_layers, map_layers, run_layers, weight_shapes
from comfy_tpu.errors import InvalidValueError, StackingError, see

INDEX = "*"
"""Replaces the layer's number in the names of stacked weights: `blocks.*.attn1.to_q.weight`."""


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Declares that the `ModuleList` at `path` holds equal blocks that pass `carry` from one to the next."""

    path: str
    carry: tuple[str, ...] = ("hidden_states",)
    """Parameters of the block's forward that its outputs replace, in the order of the outputs."""
    carry_axes: tuple[str | None, ...] = ("dp", "sp", None)
    """How each carried tensor is split over the mesh between layers."""
    varying: tuple[str, ...] = ("layer_idx",)
    """Attributes that may differ between the blocks because their forward does not read them."""
    attends: bool = True
    """Whether its blocks attend among all tokens, which decides what they cost."""


class StackedBlocks(torch.nn.Module):
    """`count` equal blocks as one: its weights have a leading layer dimension."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.count = len(blocks)
        self._modules[INDEX] = blocks[0]

    @property
    def template(self) -> torch.nn.Module:
        template = self._modules[INDEX]
        assert template is not None
        return template

    def block_names(self, path: str) -> tuple[str, ...]:
        """The checkpoint's names of the blocks, for blocks at `path` in the module."""
        return tuple(f"{path}.{index}" for index in range(self.count))


class ScannedLayers(StackedBlocks):
    """A list of equal blocks that iterates as one module."""

    def __init__(self, stack: LayerStack, blocks: torch.nn.ModuleList) -> None:
        super().__init__(list(blocks))
        self.stack = stack

    def __iter__(self) -> Iterator[ScannedLayers]:
        yield self

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            if range(self.count)[index] == range(self.count):
                return self
            raise StackingError(
                f"the model takes {self.stack.path}[{index.start}:{index.stop}:{index.step}] of {self.count} scanned "
                f"layers; only the whole list runs as a scan: leave it out of the family's stacks{see('uneven-blocks')}"
            )
        range(self.count)[index]  # IndexError as a list would raise it
        return _LayerReference(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.template, name)

    @property
    def layers(self) -> StackedLayers:
        """For `scan_layers` and `scan_groups`, in a trace."""
        return StackedLayers(self.template, self.stack.path, self.count, self.stack.carry_axes)

    def map(self, function: Callable[[torch.nn.Module], Any]) -> Any:
        """`function(block)` for every layer, with a leading layer dimension in its results."""
        return map_layers(self.template, function, count=self.count, path=self.stack.path)

    def fold(self, function: Callable[[torch.nn.Module, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """`carry, result = function(block, carry)` for every layer; the last carry, and all results."""
        return fold_layers(self.template, function, carry, count=self.count, path=self.stack.path)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.template.forward).bind(*args, **kwargs)
        missing = [name for name in self.stack.carry if name not in bound.arguments]
        if missing:
            raise StackingError(
                f"{self.stack.path} is said to carry {missing[0]!r}, but its blocks were called with "
                f"{', '.join(bound.arguments)}; correct the carry of its LayerStack{see('uneven-blocks')}"
            )
        stack = self.stack
        return run_layers(
            self.template, bound, stack.carry, layers=range(self.count), carry_axes=stack.carry_axes, path=stack.path
        )


class _LayerReference:
    """One layer of a scanned list: its attributes can be read, but it has no weights of its own and cannot run."""

    def __init__(self, layers: ScannedLayers) -> None:
        self._layers = layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers.template, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StackingError(
            f"the model calls a single layer of {self._layers.stack.path}, which runs as a scan; only a loop over the "
            f"whole list does: leave it out of the family's stacks{see('uneven-blocks')}"
        )


def stack_layers(module: torch.nn.Module, stacks: tuple[LayerStack, ...]) -> torch.nn.Module:
    """Replaces the lists named by `stacks` in a skeleton, after checking that their blocks are equal."""
    for stack in stacks:
        parent_path, _, name = stack.path.rpartition(".")
        try:
            parent = module.get_submodule(parent_path)
        except AttributeError as error:
            raise StackingError(f"{type(module).__name__} has no {stack.path} ({error})") from None
        blocks = parent._modules.get(name)
        if not isinstance(blocks, torch.nn.ModuleList) or not blocks:
            raise StackingError(
                f"{stack.path} of {type(module).__name__} is {type(blocks).__name__}, expected a ModuleList with blocks"
            )
        for index, block in enumerate(blocks):
            if difference := block_difference(blocks[0], block, stack.varying):
                raise StackingError(
                    f"{stack.path}[{index}] differs from {stack.path}[0] in {difference}; a scan needs equal blocks: "
                    "leave the list out of the family's stacks, or name the attribute in `varying` if it is not read"
                    f"{see('uneven-blocks')}"
                )
        parent._modules[name] = ScannedLayers(stack, blocks)
    return module


def block_difference(first: torch.nn.Module, other: torch.nn.Module, varying: tuple[str, ...]) -> str | None:
    one, two = _facts(first, varying), _facts(other, varying)
    for name in one.keys() | two.keys():
        if one.get(name) != two.get(name):
            return f"{name} ({one.get(name, 'absent')} there, {two.get(name, 'absent')} here)"
    return None


_COMMON_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def _facts(block: torch.nn.Module, varying: tuple[str, ...]) -> Mapping[str, Any]:
    """What a block's forward could depend on: classes, attributes, shapes of weights, values of computed buffers."""
    facts: dict[str, Any] = {}
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        facts[f"{prefix}class"] = type(module).__qualname__
        for name, value in vars(module).items():
            if name not in varying and name not in _COMMON_ATTRIBUTES:
                facts[prefix + name] = _as_comparable(value)
        for name, tensor in (module._parameters | module._buffers).items():
            computed = name in module._non_persistent_buffers_set
            described = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            facts[prefix + name] = _as_comparable(tensor) if computed else described
    return facts


def _as_comparable(value: Any, depth: int = 4) -> Any:
    """A value that is equal for two attributes if a forward cannot distinguish them; looks `depth` levels deep."""
    if isinstance(value, torch.Tensor):
        described = (tuple(value.shape), value.dtype)
        return described if value.is_meta else (*described, value.detach().flatten().tolist())
    if isinstance(value, Mapping):
        return {key: _as_comparable(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value), [_as_comparable(item, depth - 1) for item in value])
    is_object = hasattr(value, "__dict__") and not (inspect.isroutine(value) or inspect.isclass(value))
    if depth and is_object:
        return (type(value), {name: _as_comparable(item, depth - 1) for name, item in vars(value).items()})
    return value


def stacked_blocks(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """The name prefix of each stack -> the checkpoint's prefixes of its layers, in order."""
    return {
        f"{path}.{INDEX}.": layers.block_names(path)
        for path, layers in module.named_modules()
        if isinstance(layers, StackedBlocks)
    }


def split_layer_name(name: str, blocks: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The checkpoint's names of a weight: one per layer for a stacked weight, in order."""
    for prefix, layers in blocks.items():
        if name.startswith(prefix):
            return tuple(f"{layer}.{name[len(prefix) :]}" for layer in layers)
    return (name,)


def check_weights(program: str, module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Raises InvalidValueError unless `weights` are those of `module`, with the same names and shapes."""
    blocks = stacked_blocks(module)
    expected = weight_shapes(module)
    if missing := sorted(set(expected) - set(weights)):
        raise InvalidValueError(
            f"{program}: {len(missing)} weights are missing, among them {missing[0]}; load them all"
        )
    for name, array in weights.items():
        owner, _, leaf = name.rpartition(".")
        try:
            parent = module.get_submodule(owner)
        except AttributeError:
            parent = torch.nn.Module()
        if leaf not in parent._parameters and leaf not in parent._buffers:
            raise InvalidValueError(f"{program}: weight {name} is given, but the module has no such weight")
        if name in expected:
            sources = split_layer_name(name, blocks)
            shape = tuple(expected[name].shape) if sources == (name,) else (len(sources), *expected[name].shape)
            if tuple(array.shape) != shape:
                raise InvalidValueError(f"{program}: weight {name} has shape {tuple(array.shape)}, expected {shape}")
