"""Runs a module that other code owns, and keeps in host memory, on our devices.

A skeleton of the module is traced; its weights are copied to the devices, and copied again when they change. The module
itself is not changed.
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

from comfy_tpu.bridge import GpuHandover, to_host, weight_shapes
from comfy_tpu.bridge.failures import model_code_errors
from comfy_tpu.bridge.model_source import raising_line
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.host_weights import HostWeights, WeightChangeDetector, device_dtype
from comfy_tpu.compiler.program import Program, ProgramEvent
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.compiler.uniform import run_with_detected_scans, stack_uniform
from comfy_tpu.compiler.weights import update_weights
from comfy_tpu.config import AttentionConfig, CacheConfig
from comfy_tpu.errors import (
    ComfyTpuError,
    InvalidValueError,
    MeshError,
    StackingError,
    TraceError,
    UnsupportedError,
    device_errors,
    see,
)
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.rules import Rule, column, covers, gather, replicate, row

logger = logging.getLogger(__name__)

SKELETON = "comfy_tpu skeleton"
"""A key of the memo of `copy.deepcopy`, which marks a copy that is made for a trace."""

Function = Callable[..., Any]
"""(skeleton, *args, **kwargs) -> tensors: the function to run."""

_numbers = itertools.count()
_HOST = torch.device("cpu")


class HostedModule:
    """Runs `function(module, …)` on the devices, for any function of the module. May be called from any thread."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        name: str,
        title: str = "",
        part: str = "",
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
        """`tables` are sharding rules of known models: the first that covers this module's weights is used.

        `title` and `part` are the names of the model and of its component for displays.

        `prepare` may change the skeleton, which no other code uses, before it is traced.

        `varying` names entries of dictionaries that differ from block to block though no block reads them.
        """
        self.name = name
        self._display = {"model": title, "part": part}
        self._module = weakref.ref(module)
        self._residency = residency
        self._on_event = on_event
        self._on_load = on_load
        self._lock = threading.RLock()
        self._change_detector = WeightChangeDetector()
        self._programs: dict[tuple[Function, Axes], Program] = {}
        self._handover = GpuHandover()
        self._tables = tables
        self._prepare = prepare
        self._varying = varying
        self._placement = placement
        self._make_component = functools.partial(
            Component, config={}, placement=placement, dtype=dtype, attention=attention, cache=cache
        )
        self._component = self._build(module, stack_uniform)
        self._key = ("hosted", next(_numbers))
        weakref.finalize(module, residency.abandon, self._key)

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

    def __call__(
        self,
        function: Function,
        *args: Any,
        axes: Axes = ("dp",),
        fetch: bool = True,
        device: torch.device = _HOST,
        meanwhile: Callable[[], None] | None = None,
        is_checked: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the results as tensors on `device`; `axes`: how the tensors among the arguments are split.

        Equal functions share programs. A function may have an attribute `varying`, which replaces the module's.

        With `fetch=False` results stay on the devices, as arrays that may be arguments of another call.

        `meanwhile`: called while the devices compute, and so is the search for changed weights, which are expected to
        be as they were; if some are not, it is computed again. What it raises is raised. `is_checked`: the weights were
        searched in a call just before, and are not again.

        On a GPU that is also ours this returns before the results are computed: what torch does with them waits.
        """
        tensors, structure = _flatten_args((args, kwargs))
        run = functools.partial(self._run, function, axes, tensors, structure, meanwhile, is_checked)
        try:
            results, inputs = run()
        except StackingError as error:
            logger.info("%s is not stacked: %s", self.name, error)
            self._unstack()
            results, inputs = run()
        if not fetch:
            return results
        if self._handover.is_for(results, device):
            with self._lock:
                return self._handover.take(results, device, inputs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self.fetch(results))

    def fetch(self, results: Any) -> Any:
        """The results of a call with `fetch=False` as host tensors. Raises the errors of their computation, which does
        not wait for anybody: DeviceMemoryError among them."""
        with device_errors(self.name):
            return to_host(results)

    def _run(
        self,
        function: Function,
        axes: Axes,
        tensors: list[Any],
        structure: _Structure,
        meanwhile: Callable[[], None] | None,
        is_checked: bool,
    ) -> tuple[Any, list[jax.Array]]:
        """The results, and the inputs on the devices."""
        with self._weights() as (module, weights):
            program = self._program(function, axes)
            with device_errors(self.name):
                inputs: list[jax.Array] = program.place("tensors", tensors)
            results = None
            if meanwhile is not None or is_checked:
                results = program(weights, tensors=inputs, structure=structure)  # returns before it is computed
            if meanwhile is not None:
                meanwhile()
            # Closely in the first call of a run, which waits for it.
            if not is_checked and (changed := self._change_detector.find_changed(module, closely=meanwhile is None)):
                results = None
                self._update(module, weights, changed)
            return results if results is not None else program(weights, tensors=inputs, structure=structure), inputs

    def _unstack(self) -> None:
        """Builds the component without stacked blocks, for a module that does not only call its blocks."""
        with self._lock:
            self._residency.evict(self._key)
            self._programs.clear()
            self._component = self._build(self._get_module(), lambda skeleton: skeleton)

    def release(self) -> None:
        """Frees the module's memory on the devices."""
        self._residency.evict(self._key)

    def forget(self, function: Function) -> None:
        """Frees the programs of a function."""
        with self._lock:
            for key in [key for key in self._programs if key[0] == function]:
                del self._programs[key]

    @property
    def compiled_count(self) -> int:
        return sum(program.compiled_count for program in self._programs.values())

    def _program(self, function: Function, axes: Axes) -> Program:
        def run(module: torch.nn.Module, tensors: list[torch.Tensor], structure: _Structure) -> Any:
            def once() -> Any:
                # Copies, which cost nothing: a model may write into its inputs, and this runs twice.
                args, kwargs = structure.unflatten_args([tensor.clone() for tensor in tensors])
                with _foreign_code_errors(self.name):
                    return function(module, *args, **kwargs)

            return run_with_detected_scans(module, once, getattr(function, "varying", self._varying))

        run.__name__ = function.__name__
        key = (function, axes)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._component.program(
                    run, static=("structure",), input_axes={"tensors": axes}, on_event=self._on_event
                )
            return self._programs[key]

    @contextmanager
    def _weights(self) -> Iterator[tuple[torch.nn.Module, dict[str, jax.Array]]]:
        """The module, and its weights on the devices as they were when they were last looked at."""
        module = self._get_module()

        def load() -> dict[str, jax.Array]:
            arrays = self._component.load(HostWeights(module), self._on_load)
            self._change_detector.record(module)
            return arrays

        nbytes = sum(slot.bytes_per_device for slot in self._component.slots)
        resident = self._residency.use(
            self._key,
            label=self.name,
            nbytes_per_device=nbytes,
            load=load,
            sharding=self._component.sharding_report,
            **self._display,
        )
        with self._lock, resident as arrays:
            yield module, arrays

    def _get_module(self) -> torch.nn.Module:
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
        self._change_detector.record(module)
        logger.info("%s: %d weights changed, %.3f GB moved", self.name, len(changed), moved / 1e9)


@contextmanager
def _foreign_code_errors(name: str) -> Iterator[None]:
    """Turns any exception of the module's code into TraceError: the code may be correct outside of a trace."""
    try:
        with model_code_errors():
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
    """The arguments of a call without their tensors."""

    tree: Any
    leaves: tuple[Hashable, ...]
    """The constants among the arguments, and `_TENSOR` in the place of each tensor."""
    types: tuple[type, ...]
    """The types of the constants: 2, 2.0 and True are equal, but are different programs."""

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
    """A deep copy of the module with its weights on meta: they are in deepcopy's memo, so no weight is copied."""
    weights = weight_shapes(module)
    with torch.inference_mode(False):
        memo: dict[Any, Any] = {SKELETON: True}
        for tensor in weights.values():
            empty = torch.empty(tensor.shape, dtype=device_dtype(tensor), device="meta")
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
    """The sharding rule of a weight of an unknown model: gathered for each use, which is correct for any model.

    With tp > 1, names that attention and feed-forward layers usually have are split by columns or rows.
    """
    pattern = glob.escape(name)
    if tp > 1 and _COLUMNS.search(name) and tensor.ndim <= 2 and tensor.shape[0] % tp == 0:
        return column(pattern)
    if tp > 1 and _ROWS.search(name) and tensor.ndim == 2 and tensor.shape[1] % tp == 0:
        return row(pattern)
    return gather(pattern) if tensor.ndim > 1 else replicate(pattern)
