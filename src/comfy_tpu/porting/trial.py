"""The trial of a small model: two traces, PyTorch, the TPU's lowering, and a compiled program's numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Literal

import jax
import jax.export
import torch

from comfy_tpu.bridge import TraceContext, call_module, to_device, to_host, weight_shapes
from comfy_tpu.bridge.catalogue import Row
from comfy_tpu.bridge.model_source import raising_place
from comfy_tpu.errors import section_of
from comfy_tpu.porting.small_models import SmallModel
from comfy_tpu.porting.targets import ANY_ERROR, describe_error
from comfy_tpu.porting.trace_record import (
    EagerRecord,
    Place,
    TraceRecord,
    format_device_tensors,
    record_dispatch,
    record_lines,
)
from comfy_tpu.porting.traps import TRAPS, Finding, find_trap
from comfy_tpu.quiet import quiet

ERROR_MAX = 1e-3
"""The largest error of a compiled program against PyTorch, both in float32: norm of the difference by norm of the
result. Most of docs/porting-table.md is at 2e-6 or less. A time step of 500 for a model that multiplies it by a
thousand is at 3e-4: the sine of 500,000 in float32."""


@dataclasses.dataclass(frozen=True, order=True)
class Operator:
    """An operator of a model, and who implements it in JAX."""

    name: str
    by: Literal["torchax", "comfy-tpu", "missing"]
    how: str
    """`lowering`, `decomposition`, `override`, `view`; for a missing one the line that calls it."""


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

    @property
    def operators(self) -> list[Operator]:
        ours = ("override", "view")
        found = [Operator(row.name, "comfy-tpu" if row.kind in ours else "torchax", row.kind) for row in self.rows]
        lines = {name: f"{place[0]}:{place[1]}" if place else "" for name, place in self.missing.items()}
        return sorted([*found, *(Operator(name, "missing", line) for name, line in lines.items())])


class _ModelCall:
    """A method of a small model as a function of weights and tensors, with its other arguments fixed."""

    def __init__(self, small: SmallModel) -> None:
        self._small = small
        self._leaves, self._structure = jax.tree.flatten(small.inputs)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        state = small.model.state_dict(keep_vars=True)
        self.weights = {name: state[name].detach() for name in weight_shapes(small.skeleton)}

    def __call__(self, weights: Mapping[str, Any], tensors: list[Any]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        inputs = jax.tree.unflatten(self._structure, leaves)
        skeleton, method = self._small.skeleton, self._small.method
        return call_module(skeleton, weights, (), inputs, context=TraceContext(), method=method)

    def abstract(self, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        """Shapes of weights and tensors, with this dtype for the floating ones."""

        def shape(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
            kind = tensor.new_empty(0).to(dtype) if tensor.is_floating_point() else tensor.new_empty(0)
            return jax.ShapeDtypeStruct(tuple(tensor.shape), to_device(kind).dtype)

        return jax.tree.map(shape, self.weights), jax.tree.map(shape, self.tensors)


def try_small(small: SmallModel, files: Set[str]) -> Trial:
    """Runs every step as far as it goes; `files` are those whose reached lines are recorded."""
    trial = Trial()
    call = _ModelCall(small)
    # Before PyTorch: what it leaves in a cache of the model has values, and would hide that a trace's has not.
    with record_lines(files) as reached:
        record = _trace(call, trial)
    if record is not None and _uses_stale_tensors(call, record, trial):
        trial.traced, trial.reached = True, reached
        return trial
    expected = _run_eagerly(small, trial, files)
    trial.reached |= reached  # PyTorch may have found a table that was made before, and passed its lines by
    if expected is None:
        return trial
    trial.traced = record is not None and not trial.missing
    trial.refusal = _comparison_refusal(expected) if trial.traced else None
    if trial.traced and trial.refusal is None:
        if _lower(call, trial):
            _compare(call, expected, trial)
        _check_bfloat16(call, trial)
    return trial


def try_operators(small: SmallModel) -> Trial:
    """Runs the steps that list the operators."""
    trial = Trial()
    trial.traced = _trace(_ModelCall(small), trial) is not None
    _run_eagerly(small, trial, frozenset())
    return trial


def _run_eagerly(small: SmallModel, trial: Trial, files: Set[str]) -> list[torch.Tensor] | None:
    """The results in PyTorch; None if an error ended the run."""
    record = EagerRecord()
    with record_lines(files) as trial.reached, quiet(), torch.no_grad(), record:
        try:
            inputs = jax.tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, small.inputs)
            result = getattr(small.model, small.method)(**inputs)
        except ANY_ERROR as error:  # it is the model's
            trial.is_complete = False
            if record.stale_uses:
                _add_findings(trial, "kept-tensor", record.stale_uses)
                return None
            place = raising_place(error)
            where = f" at {place[0]}:{place[1]}" if place else ""
            # What a trace says of it is this too, in other words.
            trial.findings, trial.rows, trial.missing, trial.operators_end = [], set(), {}, None
            trial.refusal = (
                f"PyTorch itself does not run it here ({describe_error(error)}{where}); "
                "give --config and --inputs that it accepts"
            )
            return None
    _add_findings(trial, "square-mask", record.square_masks)
    return _result_tensors(result)


def _result_tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors, and numbers as a compiled program returns them, in JAX's order: it sorts the keys of a dict."""
    kinds = (torch.Tensor, bool, int, float)
    return [torch.as_tensor(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, kinds)]


def _comparison_refusal(expected: list[torch.Tensor]) -> str | None:
    if not any(each.numel() for each in expected):
        return "it returns no tensor, so there is nothing to compare; give --inputs with which it returns one"
    if not all(bool(each.isfinite().all()) for each in expected):
        return "its result in PyTorch has NaN or infinity, which nothing can be compared with; give other --inputs"
    return None


def _trace(call: _ModelCall, trial: Trial) -> TraceRecord | None:
    """The record of a trace; None if an error ended it."""
    failed: BaseException | None = None
    with record_dispatch() as record:
        try:
            jax.eval_shape(call, *call.abstract())
        except ANY_ERROR as error:  # it is the model's
            failed = error
    if failed is not None:
        _, section = section_of(failed)
        _add_error(trial, section if section in TRAPS else "trace", failed, describe_error(failed))
        record = _record_with_values(call, record, trial)
    trial.rows, trial.missing = record.rows, record.missing
    for name, place in record.missing.items():
        reason = f"neither torchax nor comfy-tpu implements {name}"
        fix = f"write it with others, or add `@operator(torch.ops.{name})` in comfy_tpu/bridge/operators/"
        _add_findings(trial, "missing-operator", [place], reason, fix)
    return record if failed is None else None


def _uses_stale_tensors(call: _ModelCall, first: TraceRecord, trial: Trial) -> bool:
    """Whether a second trace, as for another size, uses a tensor that the first one left behind."""
    is_returned = False

    def call_and_look(weights: Any, tensors: Any) -> Any:
        nonlocal is_returned
        results = call(weights, tensors)
        past = {id(tensor.jax()) for tensor in first.tensors.values()}
        is_returned = any(id(leaf) in past for leaf in jax.tree.leaves(results))
        return results

    # JAX raises errors of its own about some of these tensors.
    with record_dispatch(first) as record, contextlib.suppress(*ANY_ERROR):
        jax.eval_shape(call_and_look, *call.abstract())
    _add_findings(trial, "kept-tensor", record.stale_uses)
    if is_returned and not record.stale_uses:
        _add_findings(trial, "kept-tensor", [None], "it returns a tensor that an earlier trace has made")
    return is_returned or bool(record.stale_uses)


def _record_with_values(call: _ModelCall, before: TraceRecord, trial: Trial) -> TraceRecord:
    """The operators of a model whose trace ends early: with values, operator by operator, it runs further."""
    with _fast_compilation(), format_device_tensors(), record_dispatch() as record:
        try:
            call(to_device(call.weights), to_device(call.tensors))
        except ANY_ERROR as error:  # it is the model's
            file, line, _ = _error_place(error) or ("", 0, "")
            trial.operators_end = f"{file}:{line}: {describe_error(error)}" if file else describe_error(error)
    record.rows |= before.rows
    record.missing = {**before.missing, **record.missing}
    return record


@contextlib.contextmanager
def _fast_compilation() -> Iterator[None]:
    """For programs of one operator, which run once. Lumina 2 has 400 of them: 14 s instead of 31 s on two cores."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _lower(call: _ModelCall, trial: Trial) -> bool:
    try:
        with quiet():
            jax.export.export(jax.jit(call), platforms=["tpu"])(*call.abstract())
    except Exception as error:  # noqa: BLE001 a lowering rule that does not exist raises anything
        _add_error(trial, "lowering", error, f"it cannot be lowered for a TPU ({describe_error(error)})")
        trial.lowered = False
    else:
        trial.lowered = True
    return trial.lowered


def _compare(call: _ModelCall, expected: list[torch.Tensor], trial: Trial) -> None:
    program = jax.jit(call)
    weights, tensors = to_device(call.weights), to_device(call.tensors)
    with quiet():
        computed = to_host(program(weights, tensors))
        live = len(jax.live_arrays())
        for _ in range(2):
            jax.block_until_ready(program(weights, tensors))
    trial.arrays_left = len(jax.live_arrays()) - live
    actual = _result_tensors(computed)
    trial.error = _largest_error(actual, expected)
    if trial.error <= ERROR_MAX:
        return
    reason = f"the compiled program returns shapes {_shapes(actual)}, PyTorch {_shapes(expected)}"
    if _shapes(actual) == _shapes(expected):
        reason = f"the compiled program differs from PyTorch by {trial.error:.1e} (expected at most {ERROR_MAX:.0e})"
        if _largest_error(_result_tensors(to_host(call(weights, tensors))), expected) <= ERROR_MAX:
            # CogView4 was such a one, until writes of slices were written otherwise (bridge/recipes.py).
            reason += "; operator by operator it agrees, so the compiler for this machine's CPU is at fault"
    _add_findings(trial, "parity", [None], reason)


def _shapes(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in tensors]


def _largest_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Infinite where shapes differ, or a value is NaN."""
    if _shapes(actual) != _shapes(expected):
        return float("inf")
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
    return max(float("inf") if error != error else error for error in errors)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def _check_bfloat16(call: _ModelCall, trial: Trial) -> None:
    """Traces in bfloat16, for the dtype of the result."""
    places: list[Place] = []

    def call_and_look(weights: Any, tensors: Any) -> Any:
        results = call(weights, tensors)
        origins = record.float32_origins.values()
        places.extend(place for leaf in jax.tree.leaves(results) for each, place in origins if each.jax() is leaf)
        return results

    with record_dispatch() as record:
        try:
            shapes = jax.eval_shape(call_and_look, *call.abstract(torch.bfloat16))
        except ANY_ERROR as error:  # it is the model's
            _add_error(trial, "dtype-drift", error, f"in bfloat16 it does not run ({describe_error(error)})")
            trial.low_precision = "none"
            return
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(shapes) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)]
    names = [str(dtype) for dtype in dtypes]
    trial.low_precision = next((name for name in names if name != "bfloat16"), names[0] if names else None)
    if trial.low_precision not in ("bfloat16", None):
        found = f"with weights and inputs in bfloat16 the result is {trial.low_precision}"
        _add_findings(trial, "dtype-drift", [*places, None][:1], f"{found}; its values left bfloat16 here")


def _add_findings(
    trial: Trial, trap: str, places: Iterable[Place | None], reason: str | None = None, fix: str | None = None
) -> None:
    trial.findings += [find_trap(trap, place, reason, fix) for place in places]


def _add_error(trial: Trial, trap: str, error: BaseException, reason: str) -> None:
    _add_findings(trial, trap, [_error_place(error)], reason)


def _error_place(error: BaseException) -> Place | None:
    """The model's line behind an error: its causes know that better, and are asked first."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return next((place for each in (*chain[1:], error) if (place := raising_place(each)) is not None), None)
