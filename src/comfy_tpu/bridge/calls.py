"""Calling a torch module as a pure function of jax arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
import torch.nn.utils.stateless

from comfy_tpu.bridge.failures import model_code_errors
from comfy_tpu.bridge.module_state import restore_module_state
from comfy_tpu.bridge.scope import TraceContext, trace_scope
from comfy_tpu.errors import TraceError, see

Weights = Mapping[str, jax.Array]


def _computed_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if buffer.device.type == "cpu"}


def is_stacked(name: str) -> bool:
    """Whether a name is that of stacked weights, which are gathered layer by layer inside the scan."""
    return ".*." in name


def call_module(
    module: torch.nn.Module,
    weights: Weights,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    context: TraceContext,
    method: str | Callable[..., Any] = "forward",
) -> Any:
    """Returns `module.method(*args)`, or `method(module, *args)` for a function: jax arrays in, jax arrays out.

    `weights` replace the module's parameters and buffers for the call. Meant to run under `jax.jit`. The module itself
    is a skeleton: nothing is written to it.
    """
    if callable(method):
        function: Callable[..., Any] = functools.partial(method, module)
    else:
        function = module if method == "forward" else getattr(module, method)
    return call_function(function, args, kwargs, context=context, module=module, weights=weights)


def call_function(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    context: TraceContext,
    module: torch.nn.Module | None = None,
    weights: Weights | None = None,
) -> Any:
    """`call_module` for any torch function; `module` and `weights` are those that the function uses, if it uses any."""
    with trace_scope(context) as environment, model_code_errors():
        inputs = environment.as_torch((tuple(args), dict(kwargs or {})))
        if module is None:
            return _check_results(environment.as_jax(function(*inputs[0], **inputs[1])))
        arrays = {
            name: array if is_stacked(name) else context.constrain_weight(name, array)
            for name, array in (weights or {}).items()
        }
        # Computed buffers go in as traced constants: left on the host, everything derived from them (a RoPE table
        # of 75,600 rows) would be worked out on the host and become a constant of its own.
        parameters = environment.as_torch(environment.t2j_copy(_computed_buffers(module)) | arrays)
        with (
            restore_module_state(module),
            torch.nn.utils.stateless._reparametrize_module(module, parameters, tie_weights=True),
        ):
            return _check_results(environment.as_jax(function(*inputs[0], **inputs[1])))


def _check_results(results: Any) -> Any:
    for leaf in jax.tree.leaves(results):
        if not isinstance(leaf, (jax.Array, int, float, bool)):
            raise TraceError(
                f"the model returned a {type(leaf).__name__}, expected tensors in tuples, lists or dicts; "
                f"pass return_dict=False if it has that{see('results')}"
            )
    return results
