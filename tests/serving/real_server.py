"""`comfy-tpu serve demo` in a process of its own, and what its metrics say."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from comfy_tpu.remote.client import ServerClient
from comfy_tpu.remote.keys import parse_address

_SLOW = """
import sys, time
from comfy_tpu.jobs import worker_thread
report = worker_thread.WorkerThread._on_progress
def report_slowly(self, progress):
    report(self, progress)
    if progress.stage == "denoising" and progress.done:
        time.sleep({seconds})
worker_thread.WorkerThread._on_progress = report_slowly
from comfy_tpu.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class RealServer:
    def __init__(
        self,
        directory: Path,
        *arguments: str,
        step_seconds: float = 0.0,
        models: Sequence[str] = ("demo",),
        environment: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        """`step_seconds`: how much longer each denoising step takes. `environment`: None is that of the tests, whose
        pipelines have the same devices and threads, and so the same bits."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._arguments = ["serve", *models, "-d", str(directory), *arguments]
        self._step_seconds, self._key = step_seconds, key
        self._environment = {**(os.environ if environment is None else environment), "JAX_PLATFORMS": "cpu"}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> ServerClient:
        return ServerClient(parse_address(self.url), self._key)

    def start(self) -> None:
        program = ["-c", _SLOW.format(seconds=self._step_seconds)] if self._step_seconds else ["-m", "comfy_tpu.cli"]
        command = [sys.executable, *program, *self._arguments, "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=self._environment)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                    return
            except OSError:  # the port is open before there is an answer
                time.sleep(0.2)
        raise AssertionError("the server did not get ready")

    def end(self, with_signal: int) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)
        self.process.wait(60)

    def steps(self) -> int:
        """Denoising steps that the server has made since it was started."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        asked = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("comfy_tpu_steps_total ")))
