"""What a model raises while it is traced, as one sentence: what a compiled program cannot do, the line, what to do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from comfy_tpu.bridge.model_source import raising_line
from comfy_tpu.errors import Section, TraceError, see


@dataclasses.dataclass(frozen=True)
class _Failure:
    types: tuple[type[Exception], ...]
    says: str
    """A part of the message; empty: any."""
    section: Section
    what: str
    do: str


_KNOWN_LATER = "in a compiled program it is known only while running"
_NO_DECISION = "the value of a tensor was needed for a decision (an `if`, a `while`, an assert)"
_DECISION = f"{_KNOWN_LATER}; decide it outside and pass it as a static argument, or use torch.where"
_NO_NUMBER = "the value of a tensor was needed as a number"
_NUMBER = f"{_KNOWN_LATER}; keep it a tensor, or decide it outside and pass it as a static argument, or use torch.where"
_LEFT_BEHIND = "a tensor that an earlier trace left behind was used (a global, or a cache of another file)"
_KEEP = "it has no value outside of its trace; keep it in a buffer of the module, or compute it each time"

_FAILURES = (
    _Failure(
        (jax.errors.NonConcreteBooleanIndexError,),
        "",
        "mask-indexing",
        "a tensor was indexed by a mask",
        f"how many rows are left is its value, and {_KNOWN_LATER}; keep all rows, decide it outside and pass it as a "
        "static argument, or use torch.where",
    ),
    _Failure(
        (jax.errors.ConcretizationTypeError,),
        " jnp.",  # JAX's functions that want a size say which they are
        "data-dependent-shape",
        "the shape of a tensor depends on the value of another (nonzero, unique, repeat_interleave, bincount)",
        "shapes must be known when compiling; compute it outside and pass it as an input, or use a form of fixed size",
    ),
    _Failure((jax.errors.TracerBoolConversionError,), "", "tensor-condition", _NO_DECISION, _DECISION),
    _Failure((jax.errors.ConcretizationTypeError,), "shape bool[]", "tensor-condition", _NO_DECISION, _DECISION),
    _Failure(
        (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ),
        "",
        "tensor-to-number",
        f"{_NO_NUMBER} (`.item()`, `.tolist()`, `int()`, a range, a size)",
        _NUMBER,
    ),
    _Failure((RuntimeError,), "cannot be called on meta tensors", "tensor-to-number", _NO_NUMBER, _NUMBER),
    _Failure((TypeError,), "format string passed to Tensor", "tensor-to-number", f"{_NO_NUMBER}, in a text", _NUMBER),
    _Failure((jax.errors.UnexpectedTracerError,), "", "kept-tensor", _LEFT_BEHIND, _KEEP),
    _Failure(
        (AssertionError, RuntimeError),
        "not compiled with CUDA",
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
def explained() -> Iterator[None]:
    """Around a model's own code in a trace. What is not known here stays what it is."""
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
            if isinstance(error, failure.types) and failure.says in str(error):
                text = f"{failure.what}{raising_line(error)}: {failure.do}{see(failure.section)}"
                raise TraceError(text) from error
        raise


def check_constants(traced: jax.stages.Traced) -> None:
    """JAX takes what another trace left behind for a constant, and fails when the program runs, in its own words."""
    if any(isinstance(constant, jax.core.Tracer) for constant in getattr(traced, "_consts", ())):
        raise TraceError(f"{_LEFT_BEHIND}: {_KEEP}{see('kept-tensor')}")
