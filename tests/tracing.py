"""Running a torch function through a trace, for comparison with torch itself."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from comfy_tpu.bridge import TraceContext, call_function, to_device, to_host


def run_traced(function: Callable[..., Any], *tensors: Any, context: TraceContext | None = None) -> Any:
    """`function(*tensors)` as a compiled program on one device, tensors back on the host."""
    jitted = jax.jit(lambda *arrays: call_function(function, arrays, context=context or TraceContext()))
    return to_host(jitted(*to_device(tensors)))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
