"""Starts the devices while torch is imported: each takes seconds, and neither needs the other."""

from __future__ import annotations

import contextlib
import threading


def start_devices(platform: str) -> None:
    """Returns at once. What goes wrong is found, and said, by whoever uses the devices."""
    if platform != "cpu":
        threading.Thread(target=_start, name="devices").start()


def _start() -> None:
    with contextlib.suppress(Exception):
        import jax

        jax.devices()
