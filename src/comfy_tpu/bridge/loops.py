"""`lax.scan` for torch functions in a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from comfy_tpu.bridge.environment import environment


def scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any) -> tuple[Any, Any]:
    """`carry, result = step(carry, part)` for every part along the first dimension of `parts`, inside a trace.

    Returns the last carry, and the results with a leading dimension. A carry keeps its shapes and dtypes.
    """
    bridge = environment()

    def once(before: Any, part: Any) -> tuple[Any, Any]:
        after, result = step(bridge.as_torch(before), bridge.as_torch(part))
        return bridge.as_jax(after), bridge.as_jax(result)

    last, results = jax.lax.scan(once, bridge.as_jax(carry), bridge.as_jax(parts))
    return bridge.as_torch(last), bridge.as_torch(results)
