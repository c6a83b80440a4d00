"""Run as a process of its own: start JAX, write one line of JSON about its devices to stdout."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def probe() -> dict[str, Any]:
    listener = _Listener()
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
    return {"platform": platform, "devices": devices, "messages": listener.messages, "error": error}


def _start_devices() -> tuple[str, list[dict[str, Any]]]:
    import jax

    found = jax.devices()
    described = []
    for device in found:
        statistics = device.memory_stats() or {}
        described.append({"id": device.id, "kind": device.device_kind, "memory_bytes": statistics.get("bytes_limit")})
    return found[0].platform, described


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(probe()) + "\n")
