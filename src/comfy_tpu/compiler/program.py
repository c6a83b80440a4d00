"""A torch module as a compiled program: trace, lower, compile, run."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.export
import numpy as np
import torch
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, SingleDeviceSharding

from comfy_tpu.bridge import TraceContext, call_module, to_device
from comfy_tpu.bridge.dtypes import numpy_dtype
from comfy_tpu.bridge.failures import check_constants, free_failed_trace
from comfy_tpu.compiler.cache import count_compilations, enable_cache, watch_cache
from comfy_tpu.compiler.stacking import check_weights
from comfy_tpu.compiler.stored import ProgramOrigin, keep_limit
from comfy_tpu.compiler.stored.executable import StoredExecutable
from comfy_tpu.config import CacheConfig
from comfy_tpu.errors import InvalidValueError, UnsupportedError, device_errors, see
from comfy_tpu.parallel.compiler_options import choose_compiler_options, compile_lowered
from comfy_tpu.parallel.constraints import Axes, constrain, even_batch_spec, even_spec
from comfy_tpu.parallel.global_arrays import move_global
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.quiet import quiet

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProgramStages:
    """A program at each stage of its making."""

    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled


@dataclasses.dataclass(frozen=True)
class ProgramEvent:
    """A stage of a program's compilation, for progress reports."""

    program: str
    stage: Literal["tracing", "lowering", "compiling", "cache_miss", "ready"]
    """"compiling" begins with a look into the persistent cache; "cache_miss" follows where XLA has to compile."""
    seconds: float
    """Seconds since the stage before; for "ready", the duration of "compiling"."""
    from_cache: bool = False
    """With "ready": whether the persistent cache had the program, so that nothing was compiled."""
    stages: ProgramStages | None = None
    """With "ready": the program itself, for looking at."""
    cache_key: str = ""
    """With "ready", after a compilation: the name of the program's entry in JAX's cache."""


def _log_event(event: ProgramEvent) -> None:
    logger.info("%s: %s (%.1f s%s)", event.program, event.stage, event.seconds, ", cached" if event.from_cache else "")


def method_name(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else method.__name__


Executable = jax.stages.Compiled | StoredExecutable


class DeviceProgram(abc.ABC):
    """A function of inputs and of weights that live on the devices, compiled once for every shape of its inputs.

    Inputs are given by name. Arrays and tensors (also in nested containers) are split over the mesh as `input_axes`
    says, whether their sizes divide or not; plain values must be named in `static`, because each different one is a
    program of its own. `output_axes` are by name where the outputs are a mapping. `donate` names inputs whose memory
    the outputs may take over: they are gone after the call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        placement: Placement | None,
        static: tuple[str, ...] = (),
        donate: tuple[str, ...] = (),
        input_axes: Mapping[str, Axes] | None = None,
        output_axes: Axes | Mapping[str, Axes] | None = None,
        cache: CacheConfig = CacheConfig(),
        on_event: Callable[[ProgramEvent], None] = _log_event,
        trace_errors: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        origin: ProgramOrigin | None = None,
    ) -> None:
        """`trace_errors`: a context manager around the model's own code while it is traced; it may convert errors.
        `origin`: stored programs of it are used, and new ones stored; None: every process traces.
        """
        self.name = name
        self._check_names(function, {"static": static, "donate": donate, "input_axes": tuple(input_axes or {})})
        self._placement = placement
        self._static = frozenset(static)
        self._donate = frozenset(donate)
        self._input_axes = dict(input_axes or {})
        self._output_axes = output_axes
        self._cache = cache
        self._on_event = on_event
        self._trace_errors = trace_errors
        self._origin = origin
        self._executables: dict[Hashable, Executable] = {}
        self._lock = threading.RLock()

    @abc.abstractmethod
    def _call(self, weights: dict[str, jax.Array], inputs: dict[str, Any]) -> Any:
        """Computes the outputs; runs while the program is traced."""

    @abc.abstractmethod
    def _check_weights(self, weights: dict[str, Any]) -> None:
        """Raises InvalidValueError if the weights are not those of this program."""

    def _check_names(self, function: Callable[..., Any], named: Mapping[str, tuple[str, ...]]) -> None:
        parameters = inspect.signature(function).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for option, names in named.items():
            if unknown := sorted(set(names) - set(parameters)):
                raise InvalidValueError(
                    f"{self.name}: {option} names {unknown[0]!r}, which is no input; inputs are {', '.join(parameters)}"
                )

    def __call__(self, weights: Mapping[str, jax.Array], /, **inputs: Any) -> Any:
        """The outputs, as jax arrays still on the devices."""
        with device_errors(self.name):
            placed = {name: self.place(name, value) for name, value in inputs.items()}
        static, kept, donated = self._split(placed)
        executable = self._executable(static, dict(weights), kept, donated)
        with device_errors(self.name):
            return executable(dict(weights), kept, donated)

    def compile(self, weights: Mapping[str, Any], /, **inputs: Any) -> None:
        """Compiles ahead of the first call. Weights and inputs may be abstract (`jax.ShapeDtypeStruct`)."""
        static, kept, donated = self._split({name: self._abstract(name, value) for name, value in inputs.items()})
        self._executable(static, dict(weights), kept, donated)

    def lower(self, weights: Mapping[str, Any], /, **inputs: Any) -> jax.stages.Lowered:
        """The program before compilation, for inspection."""
        static, kept, donated = self._split({name: self._abstract(name, value) for name, value in inputs.items()})
        return self._jit(static).lower(dict(weights), kept, donated)

    def shapes(self, weights: Mapping[str, Any], /, **inputs: Any) -> Any:
        """The outputs without their values (`jax.ShapeDtypeStruct`): traced, and neither compiled nor run."""
        static, kept, donated = self._split({name: self._abstract(name, value) for name, value in inputs.items()})
        return jax.eval_shape(self._jit(static), dict(weights), kept, donated)

    def used_weights(self, weights: Mapping[str, Any], /, **inputs: Any) -> frozenset[str]:
        """The weights that the outputs depend on: traced, and neither compiled nor run."""
        static, kept, donated = self._split({name: self._abstract(name, value) for name, value in inputs.items()})
        traced = self._jit(static).trace(dict(weights), kept, donated)
        jaxpr = traced.jaxpr.jaxpr
        _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        names = sorted(weights)  # the order in which jax flattens a dict, and weights are the first argument
        return frozenset(itertools.compress(names, used))

    def export(self, platform: str, weights: Mapping[str, Any], /, **inputs: Any) -> jax.export.Exported:
        """The program lowered for a platform that need not be attached; its mesh may be abstract."""
        static, kept, donated = self._split({name: self._abstract(name, value) for name, value in inputs.items()})
        jax_platform = {"gpu": "cuda"}.get(platform, platform)
        return jax.export.export(self._jit(static), platforms=[jax_platform])(dict(weights), kept, donated)

    def compiled_texts(self) -> list[str]:
        """The optimized HLO of all compiled programs, for inspection."""
        return [executable.as_text() or "" for executable in self._executables.values()]

    @property
    def compiled_count(self) -> int:
        return len(self._executables)

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Hashable], dict[str, Any], dict[str, Any]]:
        static = {name: value for name, value in inputs.items() if name in self._static}
        kept = {name: value for name, value in inputs.items() if name not in self._static | self._donate}
        donated = {name: value for name, value in inputs.items() if name in self._donate}
        for name, value in (kept | donated).items():
            for leaf in jax.tree.leaves(value):
                if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
                    raise InvalidValueError(
                        f"{self.name}: input {name!r} holds a {type(leaf).__name__}, expected an array; "
                        "pass a tensor, or name the input in `static` if a new value may compile a new program"
                    )
        return static, kept, donated

    def _sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding | None:
        placement = self._placement
        if placement is None:
            return None
        return placement.sharding(*even_spec(self._input_axes.get(name, ()), shape, placement))

    def place(self, name: str, value: Any) -> Any:
        """An input on the devices, as a call would put it there."""
        if name in self._static:
            return value

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, (jax.Array, torch.Tensor, np.ndarray)):
                return leaf
            sharding = self._sharding(name, tuple(leaf.shape))
            return move_global(leaf, sharding) if isinstance(leaf, jax.Array) else to_device(leaf, sharding)

        return jax.tree.map(place, value)

    def _abstract(self, name: str, value: Any) -> Any:
        if name in self._static:
            return value

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, (torch.Tensor, jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
                return leaf
            dtype = numpy_dtype(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf.dtype
            dtype = jax.dtypes.canonicalize_dtype(dtype)  # int64 arrives as int32
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=self._sharding(name, tuple(leaf.shape)))

        return jax.tree.map(describe, value)

    def _constrain_input(self, name: str, value: Any) -> Any:
        """Splits an input inside the program, where the split may be uneven, unlike that of an argument."""
        placement, axes = self._placement, self._input_axes.get(name)
        if placement is None or axes is None:
            return value

        def split(leaf: jax.Array) -> jax.Array:
            return constrain(leaf, placement, even_batch_spec(axes, leaf.shape, placement))

        return jax.tree.map(split, value)

    def _jit(self, static: dict[str, Hashable]) -> Any:
        def run(weights: dict[str, jax.Array], kept: dict[str, Any], donated: dict[str, Any]) -> Any:
            with free_failed_trace((weights, kept, donated)):
                given = {name: self._constrain_input(name, value) for name, value in {**kept, **donated}.items()}
                with self._trace_errors():
                    outputs = self._call(weights, given | static)
                return self._constrain_outputs(outputs)

        run.__name__ = self.name.replace(".", "_")
        return jax.jit(run, donate_argnums=(2,) if self._donate else ())

    def _constrain_outputs(self, outputs: Any) -> Any:
        placement, output_axes = self._placement, self._output_axes
        if placement is None or output_axes is None:
            return outputs

        def constrain_tree(value: Any, axes: Axes) -> Any:
            return jax.tree.map(lambda leaf: constrain(leaf, placement, even_spec(axes, leaf.shape, placement)), value)

        if not isinstance(output_axes, Mapping):
            return constrain_tree(outputs, output_axes)
        return {name: constrain_tree(value, output_axes.get(name, ())) for name, value in outputs.items()}

    def _executable(
        self, static: dict[str, Hashable], weights: dict[str, Any], kept: dict[str, Any], donated: dict[str, Any]
    ) -> Executable:
        for name, array in weights.items():
            if not isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
                raise InvalidValueError(
                    f"{self.name}: weight {name} is a {type(array).__name__}, expected a jax array; use Component.load"
                )
        leaves, structure = jax.tree.flatten((weights, kept, donated))
        # An abstract leaf without a sharding stands for an array on the default device.
        default = SingleDeviceSharding(jax.devices()[0])
        described = tuple((leaf.shape, leaf.dtype, leaf.sharding or default) for leaf in leaves)
        # With its type: 2, 2.0 and True are equal, but are different programs.
        values = tuple((name, type(value), value) for name, value in sorted(static.items()))
        key = (values, structure, described)
        try:
            hash(values)
        except TypeError as error:
            raise InvalidValueError(f"{self.name}: a static input cannot be compared ({error}); pass a tuple") from None
        with self._lock:  # two threads that want the same shape wait for one compilation
            if key not in self._executables:
                self._executables[key], ready = self._build(static, weights, kept, donated)
                self._on_event(ready)  # last, so that the program is kept if the callback raises
            return self._executables[key]

    def _build(self, static: dict[str, Hashable], *arguments: dict[str, Any]) -> tuple[Executable, ProgramEvent]:
        """The program, from the store or compiled, and its "ready" event."""
        enable_cache(self._cache)
        placement = self._placement
        options = (
            choose_compiler_options(placement.platform, placement.chip, placement.sizes)
            if placement is not None
            else choose_compiler_options(jax.default_backend())
        )
        if placement is None or self._origin is None:
            return self._compile(static, arguments, options)
        begin, store = time.perf_counter(), self._origin.store
        traced = (self._origin.parts, self._donate, self._input_axes, self._output_axes)
        key = store.program_key(self.name, traced, placement.mesh, (arguments, static), options)
        if key is None:
            return self._compile(static, arguments, options)
        with device_errors(self.name):
            stored = store.load_program(key, placement.mesh)
        if stored is not None:
            self._on_event(ProgramEvent(self.name, "compiling", 0.0))
            return stored, ProgramEvent(self.name, "ready", time.perf_counter() - begin, from_cache=True)
        compiled, ready = self._compile(static, arguments, options)
        if foreign := self._origin.find_foreign_code():
            logger.info("%s is not stored: another package has replaced %s", self.name, foreign)
        else:
            store.save_program(key, compiled, ready.cache_key, placement.mesh, name=self.name, device=placement.chip)
        return compiled, ready

    def _compile(
        self, static: dict[str, Hashable], arguments: tuple[dict[str, Any], ...], options: Mapping[str, str | bool]
    ) -> tuple[jax.stages.Compiled, ProgramEvent]:
        """The compiled program, and its "ready" event."""
        self._check_weights(arguments[0])
        clock = time.perf_counter()

        def enter(stage: Literal["tracing", "lowering", "compiling"]) -> None:
            nonlocal clock
            before, clock = clock, time.perf_counter()
            self._on_event(ProgramEvent(self.name, stage, clock - before))

        enter("tracing")
        with jax.profiler.TraceAnnotation(f"trace {self.name}"):
            traced = self._jit(static).trace(*arguments)
        check_constants(traced)
        enter("lowering")
        with quiet(), _lowering_errors(self.name), jax.profiler.TraceAnnotation(f"lower {self.name}"):
            lowered = traced.lower()
        enter("compiling")
        with (
            count_compilations() as count,
            watch_cache(
                lambda: self._on_event(ProgramEvent(self.name, "cache_miss", time.perf_counter() - clock))
            ) as lookup,
            quiet(),
            device_errors(self.name),
            jax.profiler.TraceAnnotation(f"compile {self.name}"),
        ):
            compiled = compile_lowered(lowered, options)
        keep_limit(self._cache, lookup, is_new=count.compiled > 0)
        stages = ProgramStages(traced, lowered, compiled)
        seconds, from_cache = time.perf_counter() - clock, count.compiled == 0
        return compiled, ProgramEvent(self.name, "ready", seconds, from_cache, stages, lookup.key)


class Program(DeviceProgram):
    """`module.method(**inputs)` of a torch module. `options` are those of `DeviceProgram`.

    `method` may also be a function on torch tensors, which is called with the module first. `module` may be a function
    that makes the module, which is called when something is traced.
    """

    def __init__(
        self,
        module: torch.nn.Module | Callable[[], torch.nn.Module],
        *,
        context: TraceContext,
        method: str | Callable[..., Any] = "forward",
        name: str | None = None,
        **options: Any,
    ) -> None:
        self._get_module = (lambda: module) if isinstance(module, torch.nn.Module) else module
        function = method if callable(method) else getattr(self._get_module(), method)
        name = name or f"{type(self._get_module()).__name__}.{method_name(method)}"
        super().__init__(name, function, placement=context.placement, **options)
        self._context = context
        self._method = method

    def _call(self, weights: dict[str, jax.Array], inputs: dict[str, Any]) -> Any:
        return call_module(self._get_module(), weights, (), inputs, context=self._context, method=self._method)

    def _check_weights(self, weights: dict[str, Any]) -> None:
        check_weights(self.name, self._get_module(), weights)


@contextlib.contextmanager
def _lowering_errors(what: str) -> Iterator[None]:
    """Turns JAX's error for an operation that a platform does not support into UnsupportedError."""
    try:
        yield
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{what} cannot be lowered ({str(error).splitlines()[0]}); write that part with other operators"
            f"{see('lowering')}"
        ) from error
