"""A real server with the demo model, and OpenAI's own client, unmodified."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


class Server:
    def __init__(self, directory: Path, models: Sequence[str] = ("demo",), **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._directory, self._models = directory, models
        self._environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "comfy_tpu.cli", "serve", *self._models, "-d", str(self._directory)]
        self.process = subprocess.Popen([*command, "--port", str(self.port)], env=self._environment)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError("the server did not get ready")

    def end(self, with_signal: int) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)
        self.process.wait(60)

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "served")
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.end(signal.SIGKILL)


def test_openai_client(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["demo"]
    chosen = {"seed": 7, "num_inference_steps": 4}
    made = client.videos.create(model="demo", prompt="a red circle moving left", size="64x64", extra_body=chosen)
    video = client.videos.poll(made.id, poll_interval_ms=100)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    content = client.videos.download_content(video.id).read()
    assert content[4:8] == b"ftyp"
    assert [each.id for each in client.videos.list()] == [video.id]
    assert client.videos.delete(video.id).deleted
    assert list(client.videos.list()) == []
    server.end(signal.SIGTERM)
    assert server.process is not None
    assert server.process.returncode is not None


def test_jobs_survive_a_kill(server: Server, tmp_path: Path) -> None:
    """Killed with one job at work and others waiting: every one is done, once, after the next start."""
    client = server.client()
    chosen = {"num_inference_steps": 20}
    made = [
        client.videos.create(model="demo", prompt="a red circle", extra_body={**chosen, "seed": seed})
        for seed in range(4)
    ]
    deadline = time.monotonic() + 60
    while client.videos.retrieve(made[0].id).status == "queued" and time.monotonic() < deadline:
        time.sleep(0.05)
    server.end(signal.SIGKILL)
    server.start()
    server.wait_until_ready()
    for each in made:
        assert client.videos.poll(each.id, poll_interval_ms=200).status == "completed"
        assert client.videos.download_content(each.id).read()[4:8] == b"ftyp"
    files = sorted(path.name for path in (tmp_path / "served").glob("*.mp4"))
    assert files == sorted(f"{each.id}.mp4" for each in made)
