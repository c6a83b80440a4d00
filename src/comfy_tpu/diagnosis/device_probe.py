"""A subprocess that starts JAX, traces a line of torch and opens the demo models; prints one line of JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class _MessageHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def probe() -> dict[str, Any]:
    listener = _MessageHandler()
    # JAX says only here, at INFO, why it passed over an accelerator: "The TPU is already in use by process …".
    logger = logging.getLogger("jax._src.xla_bridge")
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    platform: str | None = None
    devices: list[dict[str, Any]] = []
    error: str | None = None
    try:
        platform, devices = _start_devices()
    except Exception as failure:  # noqa: BLE001 - whatever stops JAX is the answer to the question
        error = f"{type(failure).__name__}: {failure}"
    tracing = _trace_error() if error is None else None
    return {
        "platform": platform,
        "devices": devices,
        "messages": listener.messages,
        "error": error,
        "tracing": tracing,
        "demo_models": _open_demo_models(),
    }


def _start_devices() -> tuple[str, list[dict[str, Any]]]:
    import jax

    found = jax.local_devices()  # of this host: a TPU slice may have several
    described = []
    for device in found:
        statistics = device.memory_stats() or {}
        described.append({"id": device.id, "kind": device.device_kind, "memory_bytes": statistics.get("bytes_limit")})
    return found[0].platform, described


def _trace_error() -> str | None:
    """Why torch code cannot be traced here: torchax depends on internals of torch and of jax."""
    try:
        import jax
        import numpy as np
        import torch

        from comfy_tpu.bridge import TraceContext, call_function

        traced = jax.jit(lambda x: call_function(torch.nn.functional.gelu, (x,), context=TraceContext()))
        jax.eval_shape(traced, jax.ShapeDtypeStruct((2,), np.float32))
    except Exception as failure:  # noqa: BLE001 - as above
        return f"{type(failure).__name__}: {failure}"
    return None


def _open_demo_models() -> dict[str, str | None]:
    """Why each demo model cannot be opened; None where it can. Configurations and the headers of weights are read."""
    try:
        from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES, ModelFiles
    except Exception:  # noqa: BLE001 - jax or torch cannot be imported, which `error` or `tracing` reports
        return {}
    found: dict[str, str | None] = {}
    for name in DEMO_DIRECTORIES:
        try:
            ModelFiles.open(name)
            found[name] = None
        except Exception as failure:  # noqa: BLE001 - such as what an import raises that does not work here
            found[name] = str(failure)
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(probe()) + "\n")
