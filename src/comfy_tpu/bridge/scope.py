"""The trace scope: where, and only where, torch calls become JAX operations."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import torch
import torch.overrides
import torch.utils._python_dispatch
from jax.sharding import PartitionSpec

from comfy_tpu.config import AttentionConfig
from comfy_tpu.errors import TraceError
from comfy_tpu.parallel.constraints import constrain
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.quiet import quiet

if TYPE_CHECKING:
    from comfy_tpu.bridge.environment import TraceEnvironment


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """What operators can read of the program that is being traced."""

    placement: Placement | None = None
    attention: AttentionConfig = AttentionConfig()
    weight_axes: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    """How each weight is split while it computes, by name. In storage a weight may be split further, and is gathered
    for each use."""
    token_grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of the video tokens, in a denoising step."""

    def constrain_weight(self, name: str, weight: jax.Array) -> jax.Array:
        if self.placement is None or name not in self.weight_axes:
            return weight
        return constrain(weight, self.placement, self.weight_axes[name])


_tracing = threading.RLock()
# torchax keeps state on its mode objects, which all threads share. Torch's mode stacks themselves are per thread:
# a thread that is not tracing never sees ours. Tracing is rare and holds the interpreter lock anyway.


class _Active(threading.local):
    def __init__(self) -> None:
        self.contexts: list[TraceContext] = []


_active = _Active()


def current_trace() -> TraceContext:
    if not _active.contexts:
        raise TraceError("this operator needs a trace scope; call the model through a Program")
    return _active.contexts[-1]


@contextlib.contextmanager
def token_grid_scope(grid: tuple[int, int, int]) -> Iterator[None]:
    """Sets the grid of the video tokens of the current trace, for windows of `video_attention` and
    `joint_attention`."""
    _active.contexts.append(dataclasses.replace(current_trace(), token_grid=grid))
    try:
        yield
    finally:
        _active.contexts.pop()


@contextlib.contextmanager
def trace_scope(context: TraceContext) -> Iterator[TraceEnvironment]:
    """Runs torch code in the block on the environment's tensors, and restores torch's global state afterwards."""
    from comfy_tpu.bridge.environment import environment

    with (
        _tracing,
        _preserve_torch_state(),
        torch.inference_mode(False),  # in it, which is where ComfyUI runs nodes, `.to(dtype)` does not reach our modes
        torch.no_grad(),
        quiet(),
        jax.default_matmul_precision("highest"),
    ):
        # "highest" makes float32 mean float32, as in torch: left to itself JAX multiplies float32 in bfloat16 on a TPU.
        # Products of bfloat16 are the same either way.
        _active.contexts.append(context)
        try:
            with environment() as active:
                yield active
        finally:
            _active.contexts.pop()


@contextlib.contextmanager
def _preserve_torch_state() -> Iterator[None]:
    """Restores torch's global state, also when the model raises, or changes a global and does not change it back."""
    dtype = torch.get_default_dtype()
    seed, random_state = torch.initial_seed(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    functional = dict(vars(torch.nn.functional))
    function_modes = torch.overrides._get_current_function_mode_stack()
    dispatch_modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        if torch.overrides._get_current_function_mode_stack() != function_modes:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in function_modes:
                torch._C._push_on_torch_function_stack(mode)
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack() != dispatch_modes:
            while torch._C._len_torch_dispatch_stack():
                torch.utils._python_dispatch._pop_mode()
            for mode in dispatch_modes:
                torch.utils._python_dispatch._push_mode(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default_device
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        if vars(torch.nn.functional) != functional:
            vars(torch.nn.functional).clear()
            vars(torch.nn.functional).update(functional)
        # Only after a new seed: a trace draws nothing, and other threads that drew meanwhile must not draw it again.
        if torch.initial_seed() != seed:
            torch.set_rng_state(random_state)
