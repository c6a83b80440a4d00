"""`comfy-tpu serve demo` on a free port, for benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serving(directory: Path, log: Path, *arguments: str) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server that is ready. Ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "comfy_tpu.cli", "serve", "demo", "-d", str(directory), "--port", str(port)]
    with log.open("wb") as errors:
        environment = {"JAX_PLATFORMS": "cpu", **os.environ}
        process = subprocess.Popen([*command, *arguments], env=environment, stdout=errors, stderr=errors)
    try:
        _wait_until_ready(process, port, log)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:  # the port is open before there is an answer
            time.sleep(0.2)
    raise SystemExit("the server did not get ready in 300 s")
