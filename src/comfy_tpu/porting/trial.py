"""The trial of a small model: two traces, PyTorch, the TPU's lowering, and a compiled program's numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import jax.export
import torch

from comfy_tpu.bridge import TraceContext, call_module, to_device, to_host, weight_shapes
from comfy_tpu.bridge.catalogue import Row
from comfy_tpu.bridge.model_source import raising_place
from comfy_tpu.errors import ComfyTpuError, section_of
from comfy_tpu.porting.recording import EagerRun, Place, Record, lines_reached, recorded_dispatch, values_in_text
from comfy_tpu.porting.small_models import SmallModel
from comfy_tpu.porting.targets import ANY_ERROR
from comfy_tpu.porting.traps import TRAPS, Finding, finding
from comfy_tpu.quiet import quiet

ERROR_MAX = 1e-3
"""Of the compiled program against PyTorch, both in float32: norm of the difference by norm of the result. Most of
docs/porting-table.md is at 2e-6 or less. A time step of 500 for a model that multiplies it by a thousand is at 3e-4:
the sine of 500,000 in float32."""


@dataclasses.dataclass
class Trial:
    """The results of a trial; None for a step that was not reached."""

    traced: bool | None = None
    lowered: bool | None = None
    error: float | None = None
    arrays_left: int | None = None
    """The number of arrays on the device after the third run, less those after the first."""
    low_precision: str | None = None
    """The dtype of the result in bfloat16, or of the first of its parts that is another."""
    rows: set[Row] = dataclasses.field(default_factory=set)
    missing: dict[str, Place | None] = dataclasses.field(default_factory=dict)
    operators_end: str | None = None
    """The line, and the reason, where the list of operators ends early; None: it is complete."""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    reached: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    refusal: str | None = None
    """Why nothing was tried, and what to give instead: PyTorch did not run it, or returned nothing to compare."""
    is_complete: bool = True
    """Whether a run ended normally, so that every line it executes is in `reached`."""

    @property
    def runs(self) -> bool:
        return bool(self.traced and self.lowered and self.error is not None and self.error <= ERROR_MAX)


class _Call:
    """A method of a small model as a function of weights and tensors, with its other arguments fixed."""

    def __init__(self, small: SmallModel) -> None:
        self._small = small
        leaves, self._structure = jax.tree.flatten(small.inputs)
        self._leaves = leaves
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        state = small.model.state_dict(keep_vars=True)
        self.weights = {name: state[name].detach() for name in weight_shapes(small.skeleton)}

    def inputs(self, tensors: list[Any]) -> dict[str, Any]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        inputs: dict[str, Any] = jax.tree.unflatten(self._structure, leaves)
        return inputs

    def __call__(self, weights: Mapping[str, Any], tensors: list[Any]) -> Any:
        small = self._small
        inputs = self.inputs(tensors)
        return call_module(small.skeleton, weights, (), inputs, context=TraceContext(), method=small.method)

    def abstract(self, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        return to_shapes(self.weights, dtype), to_shapes(self.tensors, dtype)


def to_shapes(tree: Any, dtype: torch.dtype) -> Any:
    def shape(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
        kind = tensor.new_empty(0).to(dtype) if tensor.is_floating_point() else tensor.new_empty(0)
        return jax.ShapeDtypeStruct(tuple(tensor.shape), to_device(kind).dtype)

    return jax.tree.map(shape, tree)


def try_small(small: SmallModel, files: Set[str]) -> Trial:
    """Runs every step as far as it goes; `files` are those whose reached lines are recorded."""
    trial = Trial()
    call = _Call(small)
    # Before PyTorch: what it leaves in a cache of the model has values, and would hide that a trace's has not.
    with lines_reached(files) as reached:
        record = _trace(call, trial)
    if record is not None and _trace_again(call, record, trial):
        trial.traced, trial.reached = True, reached
        return trial
    expected = _eager(small, trial, files)
    trial.reached |= reached  # PyTorch may have found a table that was made before, and passed its lines by
    if expected is None:
        return trial
    trial.traced = record is not None and not trial.missing
    if not trial.traced:
        return trial
    trial.refusal = _comparison_refusal(expected)
    if trial.refusal is not None:
        return trial
    if _lower(call, trial):
        _compare(call, expected, trial)
    _check_bfloat16(call, trial)
    return trial


def try_operators(small: SmallModel) -> Trial:
    """Runs the steps that list the operators."""
    trial = Trial()
    trial.traced = _trace(_Call(small), trial) is not None
    _eager(small, trial, frozenset())
    return trial


def _eager(small: SmallModel, trial: Trial, files: Set[str]) -> list[torch.Tensor] | None:
    watch = EagerRun()
    with lines_reached(files) as trial.reached, quiet(), torch.no_grad(), watch:
        try:
            inputs = jax.tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, small.inputs)
            result = getattr(small.model, small.method)(**inputs)
        except ANY_ERROR as error:  # it is the model's
            if watch.kept:
                trial.is_complete = False
                _add_kept(trial, watch.kept)
                return None
            place = raising_place(error)
            where = f" at {place[0]}:{place[1]}" if place else ""
            # What a trace says of it is this too, in other words.
            trial.findings, trial.rows, trial.missing, trial.operators_end = [], set(), {}, None
            trial.is_complete = False
            trial.refusal = (
                f"PyTorch itself does not run it here ({_first_line(error)}{where}); "
                "give --config and --inputs that it accepts"
            )
            return None
    trial.findings += [_finding_at("square-mask", place) for place in watch.square]
    return _results(result)


def _results(tree: Any) -> list[torch.Tensor]:
    """Tensors, and numbers as a compiled program returns them, in JAX's order: it sorts the keys of a dict."""
    kinds = (torch.Tensor, bool, int, float)
    return [torch.as_tensor(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, kinds)]


def _comparison_refusal(expected: list[torch.Tensor]) -> str | None:
    if not any(each.numel() for each in expected):
        return "it returns no tensor, so there is nothing to compare; give --inputs with which it returns one"
    if not all(bool(each.isfinite().all()) for each in expected):
        return "its result in PyTorch has NaN or infinity, which nothing can be compared with; give other --inputs"
    return None


def _trace(call: _Call, trial: Trial) -> Record | None:
    """The record of a trace; None if an error ended it."""
    failed: BaseException | None = None
    with recorded_dispatch() as record:
        try:
            jax.eval_shape(call, *call.abstract())
        except ANY_ERROR as error:  # it is the model's
            failed = error
    if failed is not None:
        _, section = section_of(failed)
        _add_error(trial, section if section in TRAPS else "trace", failed, _first_line(failed))
        record = _operators_with_values(call, record, trial)
    trial.rows, trial.missing = record.rows, record.missing
    for name, place in record.missing.items():
        reason = f"neither torchax nor comfy-tpu implements {name}"
        fix = f"write it with others, or add `@operator(torch.ops.{name})` in comfy_tpu/bridge/operators/"
        trial.findings.append(_finding_at("missing-operator", place, reason, fix))
    return record if failed is None else None


def _trace_again(call: _Call, first: Record, trial: Trial) -> bool:
    """Whether a second trace, as for another size, uses a tensor that the first one left behind."""
    returned = False

    def call_and_watch(weights: Any, tensors: Any) -> Any:
        nonlocal returned
        results = call(weights, tensors)
        past = {id(tensor.jax()) for tensor in first.traced.values()}
        returned = any(id(leaf) in past for leaf in jax.tree.leaves(results))
        return results

    # JAX raises errors of its own about some of these tensors.
    with recorded_dispatch(first) as record, contextlib.suppress(*ANY_ERROR):
        jax.eval_shape(call_and_watch, *call.abstract())
    _add_kept(trial, record.kept)
    if returned and not record.kept:
        reason = "it returns a tensor that an earlier trace has made"
        trial.findings.append(_finding_at("kept-tensor", None, reason))
    return returned or bool(record.kept)


def _add_kept(trial: Trial, places: list[Place]) -> None:
    trial.findings += [_finding_at("kept-tensor", place) for place in places]


def _operators_with_values(call: _Call, before: Record, trial: Trial) -> Record:
    """The operators of a model whose trace ends early: with values, operator by operator, it runs further."""
    with _fast_compilation(), values_in_text(), recorded_dispatch() as record:
        try:
            call(to_device(call.weights), to_device(call.tensors))
        except ANY_ERROR as error:  # it is the model's
            file, line, _ = _place(error) or ("", 0, "")
            trial.operators_end = f"{file}:{line}: {_first_line(error)}" if file else _first_line(error)
    record.rows |= before.rows
    record.missing = {**before.missing, **record.missing}
    return record


@contextlib.contextmanager
def _fast_compilation() -> Iterator[None]:
    """For programs of one operator that run once. Lumina 2 has 400 of them: 14 s instead of 31 s on two cores."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _lower(call: _Call, trial: Trial) -> bool:
    try:
        with quiet():
            jax.export.export(jax.jit(call), platforms=["tpu"])(*call.abstract())
    except Exception as error:  # noqa: BLE001 a lowering rule that does not exist raises anything
        _add_error(trial, "lowering", error, f"it cannot be lowered for a TPU ({_first_line(error)})")
        trial.lowered = False
    else:
        trial.lowered = True
    return trial.lowered


def _compare(call: _Call, expected: list[torch.Tensor], trial: Trial) -> None:
    program = jax.jit(call)
    weights, tensors = to_device(call.weights), to_device(call.tensors)
    with quiet():
        computed = to_host(program(weights, tensors))
        live = len(jax.live_arrays())
        for _ in range(2):
            jax.block_until_ready(program(weights, tensors))
    trial.arrays_left = len(jax.live_arrays()) - live
    actual = _results(computed)
    if _shapes(actual) != _shapes(expected):
        trial.error = float("inf")
        reason = f"the compiled program returns shapes {_shapes(actual)}, PyTorch {_shapes(expected)}"
        trial.findings.append(_finding_at("parity", None, reason))
        return
    trial.error = _largest_error(actual, expected)
    if trial.error > ERROR_MAX:
        reason = f"the compiled program differs from PyTorch by {trial.error:.1e} (expected at most {ERROR_MAX:.0e})"
        alone = _results(to_host(call(weights, tensors)))
        if _shapes(alone) == _shapes(expected) and _largest_error(alone, expected) <= ERROR_MAX:
            # CogView4 was such a one, until writes of slices were written otherwise (bridge/recipes.py).
            reason += "; operator by operator it agrees, so the compiler for this machine's CPU is at fault"
        trial.findings.append(_finding_at("parity", None, reason))


def _shapes(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in tensors]


def _largest_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
    return max(float("inf") if error != error else error for error in errors)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def _check_bfloat16(call: _Call, trial: Trial) -> None:
    """Traces in bfloat16, for the dtype of the result."""
    places: list[Place] = []

    def call_and_watch(weights: Any, tensors: Any) -> Any:
        results = call(weights, tensors)
        places.extend(
            place
            for leaf in jax.tree.leaves(results)
            for tensor, place in record.widened.values()
            if tensor.jax() is leaf
        )
        return results

    with recorded_dispatch() as record:
        try:
            shapes = jax.eval_shape(call_and_watch, *call.abstract(torch.bfloat16))
        except ANY_ERROR as error:  # it is the model's
            _add_error(trial, "dtype-drift", error, f"in bfloat16 it does not run ({_first_line(error)})")
            trial.low_precision = "none"
            return
    floating = [leaf.dtype for leaf in jax.tree.leaves(shapes) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)]
    names = [str(dtype) for dtype in floating]
    trial.low_precision = next((name for name in names if name != "bfloat16"), names[0] if names else None)
    if trial.low_precision not in ("bfloat16", None):
        reason = (
            f"with weights and inputs in bfloat16 the result is {trial.low_precision}; its values left bfloat16 here"
        )
        trial.findings.append(_finding_at("dtype-drift", places[0] if places else None, reason))


def _add_error(trial: Trial, trap: str, error: BaseException, reason: str) -> None:
    trial.findings.append(dataclasses.replace(_finding_at(trap, _place(error), reason), reached=True))


def _place(error: BaseException) -> Place | None:
    cause: BaseException | None = error
    while cause is not None:
        # What went wrong first knows the line best.
        place = raising_place(cause.__cause__ or cause)
        if place is not None:
            return place
        cause = cause.__cause__
    return raising_place(error)


def _first_line(error: BaseException) -> str:
    text = section_of(error)[0].strip().splitlines()
    first = text[0] if text else ""
    return first if isinstance(error, ComfyTpuError) else f"{type(error).__name__}: {first}".rstrip(": ")


def _finding_at(trap: str, place: Place | None, reason: str | None = None, fix: str | None = None) -> Finding:
    file, line, _ = place or ("", 0, "")
    return finding(trap, file, line, linecache.getline(file, line).strip() if file else "", reason=reason, fix=fix)
