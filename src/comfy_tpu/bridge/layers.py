"""One traced block over stacked weights: the torch side of the scan over layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.nn.utils.stateless

from comfy_tpu.bridge.environment import DeviceTensor, environment
from comfy_tpu.bridge.loops import scan_arrays
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.bridge.skeleton import weight_shapes
from comfy_tpu.errors import StackingError, see
from comfy_tpu.parallel.constraints import Axes, constrain, even_batch_spec


class BlockCall:
    """Arguments of a block as it was called; like `inspect.BoundArguments`, but of any signature (*args too)."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
        self.arguments = dict(given)

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(value for name, value in self.arguments.items() if isinstance(name, int))

    @property
    def kwargs(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if isinstance(name, str)}


def run_layers(
    block: torch.nn.Module,
    call: BlockCall | inspect.BoundArguments,
    carry: tuple[str | int, ...],
    *,
    layers: range,
    carry_axes: tuple[str | None, ...],
    path: str,
) -> Any:
    """Runs `block` for `layers` of the stacked weights, its outputs replacing the arguments named by `carry`.

    Returns what the last layer returns, with None for outputs beyond the carried ones.
    """
    bridge, trace = environment(), current_trace()
    stacked = bridge.as_jax(weight_shapes(block))
    if any(array.shape[0] != len(layers) for array in stacked.values()):
        stacked = {name: array[layers.start : layers.stop] for name, array in stacked.items()}
    output_count: int | None = None

    def place(value: jax.Array) -> jax.Array:
        if trace.placement is None or value.ndim != len(carry_axes):
            return value
        return constrain(value, trace.placement, even_batch_spec(carry_axes, value.shape, trace.placement))

    def layer(carried: tuple[jax.Array, ...], weights: dict[str, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        nonlocal output_count
        weights = {name: trace.constrain_weight(f"{path}.*.{name}", array) for name, array in weights.items()}
        arguments: Any = call.arguments
        arguments.update(zip(carry, bridge.as_torch(tuple(map(place, carried))), strict=True))
        with torch.nn.utils.stateless._reparametrize_module(block, bridge.as_torch(weights), tie_weights=True):
            outputs = block(*call.args, **call.kwargs)
        output_count = len(outputs) if isinstance(outputs, tuple) else None
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = tuple(bridge.as_jax(outputs[: len(carry)]))
        for name, before, after in zip(carry, carried, results, strict=True):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise StackingError(
                    f"a block of {path} turns {name} from {before.dtype}{list(before.shape)} into "
                    f"{after.dtype}{list(after.shape)}; a scan needs the same in and out: cast before the first block"
                    f"{see('uneven-blocks')}"
                )
        return tuple(map(place, results)), None

    given: Any = call.arguments
    initial = tuple(bridge.as_jax(tuple(given[name] for name in carry)))
    final, _ = scan_arrays(layer, initial, stacked, length=len(layers))
    results = tuple(bridge.as_torch(final))
    return results[0] if output_count is None else results + (None,) * (output_count - len(results))


def run_layer(block: torch.nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, path: str) -> Any:
    """`block(*args, **kwargs)` with the weights of one layer of a stack."""
    bridge, trace = environment(), current_trace()
    weights = {
        name: trace.constrain_weight(f"{path}.*.{name}", array[index])
        for name, array in bridge.as_jax(weight_shapes(block)).items()
    }
    with torch.nn.utils.stateless._reparametrize_module(block, bridge.as_torch(weights), tie_weights=True):
        return block(*args, **kwargs)


def tensor_content(tensor: torch.Tensor) -> object:
    """An object that identifies a tensor's content: another one once its memory was written to in the trace."""
    if not isinstance(tensor, DeviceTensor):
        return tensor
    traced: Any = tensor
    return traced._memory.value


def fold_layers(
    block: torch.nn.Module,
    function: Callable[[torch.nn.Module, Any], tuple[Any, Any]],
    carry: Any,
    *,
    count: int,
    path: str,
) -> tuple[Any, Any]:
    """`carry, result = function(block, carry)` for every layer of stacked weights, in order. Returns the last carry,
    and the results with a leading layer dimension. A carry keeps its shapes and dtypes."""
    bridge, trace = environment(), current_trace()

    def layer(before: Any, weights: dict[str, jax.Array]) -> tuple[Any, Any]:
        weights = {name: trace.constrain_weight(f"{path}.*.{name}", array) for name, array in weights.items()}
        with torch.nn.utils.stateless._reparametrize_module(block, bridge.as_torch(weights), tie_weights=True):
            after, result = function(block, bridge.as_torch(before))
        return bridge.as_jax(after), bridge.as_jax(result)

    last, results = scan_arrays(layer, bridge.as_jax(carry), bridge.as_jax(weight_shapes(block)), length=count)
    return bridge.as_torch(last), bridge.as_torch(results)


def map_layers(block: torch.nn.Module, function: Callable[[torch.nn.Module], Any], *, count: int, path: str) -> Any:
    """`function(block)` for every layer of stacked weights; results have a leading layer dimension."""
    stack = StackedLayers(block, path, count, ())
    return scan_layers(stack, lambda block, carry, part: (None, function(block)), None)[1]


@dataclasses.dataclass(frozen=True)
class StackedLayers:
    """Layers of a scan: a block, and the weights of all of them."""

    block: torch.nn.Module
    path: str
    count: int
    carry_axes: Axes
    """How a carried tensor of so many dimensions is split over the mesh between layers."""
    weights: dict[str, jax.Array] | None = None
    """With a leading layer dimension. None: those that the block has in this trace."""

    def part(self, start: int, stop: int) -> StackedLayers:
        """Some of the layers, which follow each other."""
        weights = {name: array[start:stop] for name, array in self.arrays.items()}
        return dataclasses.replace(self, count=stop - start, weights=weights)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        given: dict[str, jax.Array] = environment().as_jax(weight_shapes(self.block))
        return given if self.weights is None else self.weights


def scan_layers(
    stack: StackedLayers,
    function: Callable[[torch.nn.Module, Any, Any], tuple[Any, Any]],
    carry: Any,
    parts: Any = None,
) -> tuple[Any, Any]:
    """`carry, result = function(block, carry, part)` for every layer, with its part of `parts`, which have a leading
    layer dimension. Returns the last carry, and the results with a leading layer dimension."""
    bridge, trace = environment(), current_trace()

    def place(value: jax.Array) -> jax.Array:
        if trace.placement is None or value.ndim != len(stack.carry_axes):
            return value
        return constrain(value, trace.placement, even_batch_spec(stack.carry_axes, value.shape, trace.placement))

    def layer(carried: Any, given: tuple[dict[str, jax.Array], Any]) -> tuple[Any, Any]:
        weights, part = given
        weights = {name: trace.constrain_weight(f"{stack.path}.*.{name}", array) for name, array in weights.items()}
        with torch.nn.utils.stateless._reparametrize_module(stack.block, bridge.as_torch(weights), tie_weights=True):
            after, result = function(stack.block, bridge.as_torch(jax.tree.map(place, carried)), bridge.as_torch(part))
        return jax.tree.map(place, bridge.as_jax(after)), bridge.as_jax(result)

    given = (stack.arrays, bridge.as_jax(parts))
    last, results = scan_arrays(layer, bridge.as_jax(carry), given, length=stack.count)
    return bridge.as_torch(last), bridge.as_torch(results)


def scan_groups(
    leaders: StackedLayers,
    members: StackedLayers,
    function: Callable[[torch.nn.Module, StackedLayers, Any, Any], Any],
    carry: Any,
    parts: Any = None,
) -> Any:
    """`carry = function(leader, its members, carry, part)` for every layer of `leaders`; the members of one are the
    next layers of `members`, the same number for each. Returns the last carry."""
    size, environment_ = members.count // leaders.count, environment()
    grouped = {name: array.reshape(-1, size, *array.shape[1:]) for name, array in members.arrays.items()}

    def group(block: torch.nn.Module, carried: Any, given: Any) -> tuple[Any, None]:
        weights, part = given
        own = dataclasses.replace(members, count=size, weights=environment_.as_jax(weights))
        return function(block, own, carried, part), None

    return scan_layers(leaders, group, carry, (environment_.as_torch(grouped), parts))[0]
