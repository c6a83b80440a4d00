"""Several processes of a run on this machine, each with CPU devices of its own."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# But for the number of devices, those of conftest.py: programs are then the same.
FLAGS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]


def find_port():
    """A port that is free, and the next one, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("localhost", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def start(*arguments, devices=2, cwd, **variables):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join((f"--xla_force_host_platform_device_count={devices}", *FLAGS)),
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_all(count, *arguments, port=None, **options):
    """The same command on `count` hosts."""
    port = port or find_port()
    return [
        start(
            *arguments,
            *("--coordinator", f"localhost:{port}", "--num-processes", str(count), "--process-id", str(number)),
            **options,
        )
        for number in range(count)
    ]


def wait_all(processes, seconds=600):
    """(status, stdout, stderr) of each; a process that does not end is killed, and fails the test."""
    deadline = time.monotonic() + seconds
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return results
