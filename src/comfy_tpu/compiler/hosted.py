"""A module that somebody else owns and keeps in host memory, run on our devices.

Its own code is traced, from a skeleton of it; its weights are copied to the devices, and again where they change.
The module itself is not touched.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import glob
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import torch

from comfy_tpu.bridge import to_host, weight_shapes
from comfy_tpu.bridge.failures import explained
from comfy_tpu.bridge.model_source import raising_line
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.host_weights import HostWeights, WeightWatch, held_as
from comfy_tpu.compiler.program import Program, ProgramEvent
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.compiler.uniform import run_watched, stack_uniform
from comfy_tpu.compiler.weights import update_weights
from comfy_tpu.config import AttentionConfig, CacheConfig
from comfy_tpu.errors import (
    ComfyTpuError,
    InvalidValueError,
    MeshError,
    StackingError,
    TraceError,
    UnsupportedError,
    see,
)
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.rules import Rule, column, covers, gather, replicate, row

logger = logging.getLogger(__name__)

SKELETON = "comfy_tpu skeleton"
"""Among the memories of a copy (`__deepcopy__`) that is made for a trace."""

Function = Callable[..., Any]
"""(module, *args, **kwargs) -> tensors: what to run, as a function on the skeleton."""

_numbers = itertools.count()


class HostedModule:
    """`function(module, …)` on the devices, for any function of the module. Calls may come from any thread."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        name: str,
        placement: Placement,
        dtype: torch.dtype,
        attention: AttentionConfig,
        residency: Residency,
        cache: CacheConfig = CacheConfig(),
        tables: Sequence[tuple[Rule, ...]] = (),
        prepare: Callable[[torch.nn.Module], None] = lambda skeleton: None,
        varying: frozenset[str] = frozenset(),
        on_event: Callable[[ProgramEvent], None] = lambda event: None,
        on_load: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """`tables` are sharding rules of models that are known: the first that covers this one is used.

        `prepare` may change the skeleton, which nobody else sees, before it is traced.

        `varying` names entries of dictionaries that differ from block to block though no block reads them.
        """
        self.name = name
        self._module = weakref.ref(module)
        self._residency = residency
        self._on_event = on_event
        self._on_load = on_load
        self._lock = threading.RLock()
        self._watch = WeightWatch()
        self._programs: dict[Hashable, Program] = {}
        self._tables = tables
        self._prepare = prepare
        self._varying = varying
        self._placement = placement
        self._make_component = functools.partial(
            Component, config={}, placement=placement, dtype=dtype, attention=attention, cache=cache
        )
        self._component = self._build(module, stack_uniform)
        self._key = ("hosted", next(_numbers))
        weakref.finalize(module, residency.evict, self._key)

    def _build(self, module: torch.nn.Module, stack: Callable[[torch.nn.Module], torch.nn.Module]) -> Component:
        skeleton = stack(_skeleton(module, self._prepare))
        spec = ComponentSpec(
            name=self.name,
            classes=(type(module).__name__,),
            build=lambda config: skeleton,
            rules=self._rules(weight_shapes(skeleton)),
        )
        return self._make_component(spec)

    def _rules(self, weights: Mapping[str, torch.Tensor]) -> tuple[Rule, ...]:
        tp = self._placement.sizes.tp
        for table in self._tables:
            if covers(table, weights, tp):
                return table
        return tuple(_rule(name, tensor, tp) for name, tensor in weights.items())

    def __call__(self, function: Function, *args: Any, axes: Axes = ("dp",), fetch: bool = True, **kwargs: Any) -> Any:
        """Host tensors in and out; `axes` say how the tensors among the arguments are split over the mesh.

        With `fetch=False` results stay on the devices, as arrays that may be arguments of another call.
        """
        tensors, structure = _flatten_args((args, kwargs))
        try:
            results = self._run(function, axes, tensors, structure)
        except StackingError as error:
            logger.info("%s is not stacked: %s", self.name, error)
            self._unstack()
            results = self._run(function, axes, tensors, structure)
        return to_host(results) if fetch else results

    def _run(self, function: Function, axes: Axes, tensors: list[Any], structure: _Structure) -> Any:
        with self._weights() as weights:
            return self._program(function, axes)(weights, tensors=tensors, structure=structure)

    def _unstack(self) -> None:
        """For a module that uses its lists in another way than by calling their blocks."""
        with self._lock:
            self._residency.evict(self._key)
            self._programs.clear()
            self._component = self._build(self._owned(), lambda skeleton: skeleton)

    def release(self) -> None:
        """What it has on the devices."""
        self._residency.evict(self._key)

    @property
    def compiled_count(self) -> int:
        return sum(program.compiled_count for program in self._programs.values())

    def _program(self, function: Function, axes: Axes) -> Program:
        def run(module: torch.nn.Module, tensors: list[torch.Tensor], structure: _Structure) -> Any:
            def once() -> Any:
                # Copies, which cost nothing: a model may write into its inputs, and this runs twice.
                args, kwargs = structure.unflatten_args([tensor.clone() for tensor in tensors])
                with _somebody_elses_code(self.name):
                    return function(module, *args, **kwargs)

            return run_watched(module, once, self._varying)

        run.__name__ = function.__name__
        key = (function, axes)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._component.program(
                    run, static=("structure",), input_axes={"tensors": axes}, on_event=self._on_event
                )
            return self._programs[key]

    @contextmanager
    def _weights(self) -> Iterator[Mapping[str, jax.Array]]:
        module = self._owned()

        def load() -> dict[str, jax.Array]:
            arrays = self._component.load(HostWeights(module), self._on_load)
            self._watch.remember(module)
            return arrays

        nbytes = sum(slot.bytes_per_device for slot in self._component.slots)
        resident = self._residency.use(
            self._key,
            label=self.name,
            nbytes_per_device=nbytes,
            load=load,
            sharding=self._component.sharding_report,
        )
        with self._lock, resident as arrays:
            if changed := self._watch.changed(module):
                self._update(module, arrays, changed)
            yield arrays

    def _owned(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise UnsupportedError(f"{self.name} was given up by its owner; load it again")
        return module

    def _update(self, module: torch.nn.Module, arrays: dict[str, jax.Array], changed: set[str]) -> None:
        try:
            moved = update_weights(HostWeights(module), self._component.slots, arrays, changed)
        except BaseException:
            self._residency.evict(self._key)
            raise
        self._watch.remember(module)
        logger.info("%s: %d weights changed, %.3f GB moved", self.name, len(changed), moved / 1e9)


@contextmanager
def _somebody_elses_code(name: str) -> Iterator[None]:
    """Runs only while it is traced: whatever it raises then, it may be right where its inputs have values."""
    try:
        with explained():
            yield
    except MeshError:
        raise  # what a user chose
    except InvalidValueError as error:  # of an operator, about what the module gave it
        raise TraceError(f"{name} gives an operator what it does not take{raising_line(error)}: {error}") from error
    except ComfyTpuError:
        raise
    except Exception as error:
        raise TraceError(
            f"{name} failed while it was traced{raising_line(error)}: {type(error).__name__}: {error}; it may need "
            f"something that a compiled program does not have{see('trace')}"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Structure:
    """Arguments without their tensors."""

    tree: Any
    leaves: tuple[Hashable, ...]
    """Constants; `_TENSOR` where a tensor goes."""
    types: tuple[type, ...]
    """Of the constants: 2, 2.0 and True are equal, but are different programs."""

    def unflatten_args(self, tensors: list[torch.Tensor]) -> Any:
        rest = iter(tensors)
        return jax.tree.unflatten(self.tree, [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves])


_TENSOR = type("_TensorPlace", (), {"__repr__": lambda self: "tensor"})()


def _flatten_args(arguments: Any) -> tuple[list[Any], _Structure]:
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda leaf: leaf is None or isinstance(leaf, torch.Tensor))
    tensors = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, jax.Array))]
    constants = tuple(_TENSOR if isinstance(leaf, (torch.Tensor, jax.Array)) else leaf for leaf in leaves)
    for constant in constants:
        if not isinstance(constant, (int, float, str, bool, type(None), torch.dtype)) and constant is not _TENSOR:
            raise UnsupportedError(
                f"an argument holds a {type(constant).__name__}, which a compiled program cannot take; expected "
                "tensors, numbers and text"
            )
    return tensors, _Structure(tree, constants, tuple(map(type, constants)))


def _skeleton(module: torch.nn.Module, prepare: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
    """A copy with its weights on meta: the weights are known to the copier before it starts, so none is copied."""
    weights = weight_shapes(module)
    with torch.inference_mode(False):
        memo: dict[Any, Any] = {SKELETON: True}
        for tensor in weights.values():
            empty = torch.empty(tensor.shape, dtype=held_as(tensor), device="meta")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty
        try:
            skeleton = copy.deepcopy(module, memo)
        except Exception as error:  # of whatever is among its attributes
            raise UnsupportedError(
                f"{type(module).__name__} cannot be copied for a trace ({type(error).__name__}: {error})"
            ) from error
        prepare(skeleton)
    return skeleton


_COLUMNS = re.compile(
    r"(^|\.)(q|k|v|to_[qkv]|[qkv]_proj|add_[qkv]_proj|ffn\.0|wi|wi_[01]|gate_proj|up_proj)\.(weight|bias)$"
)
_ROWS = re.compile(r"(^|\.)(o|to_out\.0|o_proj|to_add_out|ffn\.2|wo|down_proj)\.weight$")


def _rule(name: str, tensor: torch.Tensor, tp: int) -> Rule:
    """Every weight in pieces over the mesh, whole while it computes: right for any model, whatever it is called.

    Where tp asks for it and a name is one that attention and feed-forward layers usually have, its columns or rows.
    """
    pattern = glob.escape(name)
    if tp > 1 and _COLUMNS.search(name) and tensor.ndim <= 2 and tensor.shape[0] % tp == 0:
        return column(pattern)
    if tp > 1 and _ROWS.search(name) and tensor.ndim == 2 and tensor.shape[1] % tp == 0:
        return row(pattern)
    return gather(pattern) if tensor.ndim > 1 else replicate(pattern)
