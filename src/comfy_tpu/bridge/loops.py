"""`lax.scan` in a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.failures import free_failed_trace


def scan_arrays(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any, *, length: int | None = None
) -> tuple[Any, Any]:
    """`lax.scan`; if `step` fails, what was traced of it is freed."""

    def once(before: Any, part: Any) -> tuple[Any, Any]:
        with free_failed_trace((before, part)):
            return step(before, part)

    return jax.lax.scan(once, carry, parts, length=length)


def scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any) -> tuple[Any, Any]:
    """`carry, result = step(carry, part)` for every part along the first dimension of `parts`, inside a trace.

    Returns the last carry, and the results with a leading dimension. A carry keeps its shapes and dtypes.
    """
    bridge = environment()

    def once(before: Any, part: Any) -> tuple[Any, Any]:
        after, result = step(bridge.as_torch(before), bridge.as_torch(part))
        return bridge.as_jax(after), bridge.as_jax(result)

    last, results = scan_arrays(once, bridge.as_jax(carry), bridge.as_jax(parts))
    return bridge.as_torch(last), bridge.as_torch(results)
