"""Errors of a model's own code during a trace, restated as one sentence: the problem, the line, the remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from comfy_tpu.bridge.model_source import raising_line
from comfy_tpu.errors import Section, TraceError, see


@dataclasses.dataclass(frozen=True)
class _Failure:
    types: tuple[type[Exception], ...]
    message_part: str
    """A pattern that the message of the exception contains; empty: any message."""
    section: Section
    problem: str
    remedy: str


_VALUE_UNKNOWN = "in a compiled program it is known only while running"
_DECISION_PROBLEM = "the value of a tensor was needed for a decision (an `if`, a `while`, an assert)"
_DECISION_REMEDY = f"{_VALUE_UNKNOWN}; decide it outside and pass it as a static argument, or use torch.where"
_NUMBER_PROBLEM = "the value of a tensor was needed as a number"
_NUMBER_REMEDY = (
    f"{_VALUE_UNKNOWN}; keep it a tensor, or decide it outside and pass it as a static argument, or use torch.where"
)
_KEPT_TENSOR_PROBLEM = "a tensor that an earlier trace left behind was used (a global, or a cache of another file)"
_KEPT_TENSOR_REMEDY = "it has no value outside of its trace; keep it in a buffer of the module, or compute it each time"

_FAILURES = (
    _Failure(
        (jax.errors.NonConcreteBooleanIndexError,),
        "",
        "mask-indexing",
        "a tensor was indexed by a mask",
        f"how many rows are left is its value, and {_VALUE_UNKNOWN}; keep all rows, decide it outside and pass it as a "
        "static argument, or use torch.where",
    ),
    _Failure(
        (jax.errors.ConcretizationTypeError,),
        " jnp.",  # JAX's functions that want a size say which they are
        "data-dependent-shape",
        "the shape of a tensor depends on the value of another (nonzero, unique, repeat_interleave, bincount)",
        "shapes must be known when compiling; compute it outside and pass it as an input, or use a form of fixed size",
    ),
    _Failure((jax.errors.TracerBoolConversionError,), "", "tensor-condition", _DECISION_PROBLEM, _DECISION_REMEDY),
    _Failure(
        (jax.errors.ConcretizationTypeError,),
        r"shape bool\[\]",
        "tensor-condition",
        _DECISION_PROBLEM,
        _DECISION_REMEDY,
    ),
    _Failure(
        (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ),
        "",
        "tensor-to-number",
        f"{_NUMBER_PROBLEM} (`.item()`, `.tolist()`, `int()`, a range, a size)",
        _NUMBER_REMEDY,
    ),
    _Failure((RuntimeError,), "cannot be called on meta tensors", "tensor-to-number", _NUMBER_PROBLEM, _NUMBER_REMEDY),
    _Failure(
        (TypeError,),
        "format string passed to Tensor",
        "tensor-to-number",
        f"{_NUMBER_PROBLEM}, in a text",
        _NUMBER_REMEDY,
    ),
    _Failure((jax.errors.UnexpectedTracerError,), "", "kept-tensor", _KEPT_TENSOR_PROBLEM, _KEPT_TENSOR_REMEDY),
    _Failure(
        (AssertionError, RuntimeError),
        "not compiled with CUDA|Found no NVIDIA driver",  # torch's CPU build, and one with CUDA
        "cuda",
        "torch.cuda was started",
        "there is no NVIDIA GPU for it; put the call behind `if torch.cuda.is_available()`",
    ),
    _Failure(
        (ValueError, RuntimeError),
        "process group has not been initialized",
        "distributed",
        "torch.distributed was used",
        "it is never started here; put the call behind `if torch.distributed.is_initialized()`",
    ),
)


@contextlib.contextmanager
def model_code_errors() -> Iterator[None]:
    """Turns exceptions of a model's own code in a trace into TraceError; exceptions that no entry matches pass."""
    try:
        yield
    except AttributeError as error:
        if error.name not in ("_elem", "_env"):
            raise
        raise TraceError(
            f"a host tensor was written with a traced value{raising_line(error)}; make it where the input is: "
            f"torch.zeros(..., device=x.device){see('host-tensor-written')}"
        ) from error
    except Exception as error:
        for failure in _FAILURES:
            if isinstance(error, failure.types) and re.search(failure.message_part, str(error)):
                text = f"{failure.problem}{raising_line(error)}: {failure.remedy}{see(failure.section)}"
                raise TraceError(text) from error
        raise


@contextlib.contextmanager
def free_failed_trace(arguments: Any) -> Iterator[None]:
    """Around all of a function that JAX traces, whose arguments these are: if it fails, what was traced is freed.

    JAX frees it when a trace ends, but not when one fails: each constant of it has a `weakref.finalize`, which holds
    the trace, which holds the constant (jax 0.10.2: a failed trace of a small model left 0.4 MB behind).
    """
    try:
        yield
    except BaseException:
        traced: Any = next((leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.core.Tracer)), None)
        if traced is not None:
            with contextlib.suppress(AttributeError, TypeError):  # in a JAX with other names it is not freed
                traced._trace.invalidate()
        raise


def check_constants(traced: jax.stages.Traced) -> None:
    """Raises TraceError if the program holds a tracer of another trace as a constant.

    JAX accepts such a constant and fails when the program runs, with a message about its own internals.
    """
    if any(isinstance(constant, jax.core.Tracer) for constant in getattr(traced, "_consts", ())):
        raise TraceError(f"{_KEPT_TENSOR_PROBLEM}: {_KEPT_TENSOR_REMEDY}{see('kept-tensor')}")
