"""Calling a torch module as a pure function of jax arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
import torch.nn.utils.stateless

from comfy_tpu.bridge.failures import explained
from comfy_tpu.bridge.module_state import nothing_kept
from comfy_tpu.bridge.scope import TraceContext, trace_scope
from comfy_tpu.errors import TraceError, see

Weights = Mapping[str, jax.Array]


def _computed_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if buffer.device.type == "cpu"}


def is_stacked(name: str) -> bool:
    """Weights of scanned layers, which are gathered layer by layer instead of here."""
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
    """`module.method(*args)`, or `method(module, *args)` for a function: jax arrays in, jax arrays out.

    `weights` stand in for its parameters and buffers. Meant to run under `jax.jit`. The module itself is a skeleton:
    nothing is written to it.
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
    """The same for any torch function, with a module whose weights it uses, or without one."""
    with trace_scope(context) as environment, explained():
        inputs = environment.as_torch((tuple(args), dict(kwargs or {})))
        if module is None:
            return _results(environment.as_jax(function(*inputs[0], **inputs[1])))
        arrays = {
            name: array if is_stacked(name) else context.for_compute(name, array)
            for name, array in (weights or {}).items()
        }
        # Computed buffers go in as traced constants: left on the host, everything derived from them (a RoPE table
        # of 75,600 rows) would be worked out on the host and become a constant of its own.
        parameters = environment.as_torch(environment.t2j_copy(_computed_buffers(module)) | arrays)
        with (
            nothing_kept(module),
            torch.nn.utils.stateless._reparametrize_module(module, parameters, tie_weights=True),
        ):
            return _results(environment.as_jax(function(*inputs[0], **inputs[1])))


def _results(results: Any) -> Any:
    for leaf in jax.tree.leaves(results):
        if not isinstance(leaf, (jax.Array, int, float, bool)):
            raise TraceError(
                f"the model returned a {type(leaf).__name__}, expected tensors in tuples, lists or dicts; "
                f"pass return_dict=False if it has that{see('results')}"
            )
    return results
