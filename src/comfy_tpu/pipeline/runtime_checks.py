"""Checks of a runtime, before a model is looked for: a choice that no model could run with must not cost a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from comfy_tpu.config import (
    AttentionConfig,
    AttentionImplementation,
    FastSettings,
    Quantization,
    ResidencyConfig,
    RuntimeConfig,
    SequenceParallel,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels import windows
from comfy_tpu.kernels.tuning import check_blocks
from comfy_tpu.pipeline.running_model import DTYPES


def check_runtime(runtime: RuntimeConfig) -> None:
    """Raises InvalidValueError for a choice that no model could run with."""
    given: object = runtime
    if not isinstance(given, RuntimeConfig):
        raise InvalidValueError(f"runtime is a {type(given).__name__}, expected a RuntimeConfig", field="runtime")
    _check_choice("dtype", runtime.dtype, ("auto", *DTYPES))
    if runtime.quantize is not None:
        _check_choice("quantize", runtime.quantize, get_args(Quantization))
    _check_preset(runtime.fast)
    check_attention(runtime.attention)
    if runtime.memory is not None:
        _check_memory(runtime.memory)


def _check_preset(given: object) -> None:
    if given is not None and not isinstance(given, FastSettings):
        raise InvalidValueError(
            f"fast is a {type(given).__name__}, expected a FastSettings such as comfy_tpu.FAST", field="fast"
        )


def _check_memory(memory: ResidencyConfig) -> None:
    fraction, budget = memory.weights_fraction, memory.budget_bytes
    if not 0 < fraction <= 1:
        raise InvalidValueError(f"weights_fraction={fraction} is not over 0 and up to 1", field="weights_fraction")
    if budget is not None and budget < 1:
        raise InvalidValueError(f"budget_bytes={budget} is not a number of bytes from 1", field="budget_bytes")


def _check_choice(field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidValueError(f"{field}={value!r} is unknown; choose from {', '.join(known)}", field=field)


def check_attention(config: AttentionConfig) -> None:
    """Raises InvalidValueError for a choice that no model could run with."""
    given: object = config
    if not isinstance(given, AttentionConfig):
        raise InvalidValueError(
            f"attention is a {type(given).__name__}, expected an AttentionConfig", field="attention"
        )
    _check_choice("attention", config.implementation, get_args(AttentionImplementation))
    _check_choice("sequence_parallel", config.sequence_parallel, get_args(SequenceParallel))
    if config.window is not None:
        windows.parse_window(str(config.window))  # one of Python's may hold any numbers
    if config.block_sizes is not None:
        check_blocks(config.block_sizes)
    most = config.dense_max_tokens
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise InvalidValueError(f"dense_max_tokens={most!r} is not a whole number from 1", field="dense_max_tokens")
