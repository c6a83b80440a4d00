"""A server whose workers are Ray actors: jobs are shared, one is cancelled, a worker dies, nothing stays behind."""

import base64
import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.jobs.ray_processes import command_line, find_processes
from tests.serving.real_server import RealServer
from tests.waiting import wait_for

pytest.importorskip("ray", reason="an extra that make test does not install: pip install '.[ray]'")

pytestmark = pytest.mark.slow


def test_jobs_on_ray_workers(tmp_path: Path) -> None:
    name, mark = "COMFY_TPU_TEST_MARK", secrets.token_hex(8)
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "RAY_ADDRESS")}
    environment = {**environment, name: mark}

    def processes() -> list[int]:
        return find_processes(f"{name}={mark}")

    with RealServer(tmp_path, "--workers", "2", environment=environment) as server:
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            _order_and_watch(client, processes)
        server.end(signal.SIGTERM)
    assert server.process is not None
    assert server.process.returncode in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    wait_for(lambda: processes() == [], 60, "the end of all processes")
    with (
        RealServer(tmp_path, environment=environment) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        # What was at work when the server ended is carried out by the next, which has no Ray.
        wait_for(lambda: _states(client) <= {"completed", "failed"}, 240, "the end of all jobs")
        failed = [video for video in _videos(client) if video["status"] == "failed"]
        assert [video["error"]["code"] for video in failed] == ["cancelled"]


def _order_and_watch(client: httpx2.Client, processes: Callable[[], list[int]]) -> None:
    made = [_order(client, seed) for seed in range(6)]
    wait_for(lambda: _video(client, made[0])["status"] == "completed", 120, "the first video")
    assert client.get(f"/v1/videos/{made[0]}/content").content[4:8] == b"ftyp"
    long = _order(client, 6, steps=1000)
    wait_for(lambda: _video(client, long)["progress"] > 0, 120, "a step of the long one")
    actors = [process for process in processes() if command_line(process).startswith(b"ray::JobActor")]
    assert len(actors) == 2
    _wait_for_preview(client, long)
    begun = time.monotonic()
    client.post(f"/v1/videos/{long}/cancel")
    os.kill(actors[0], signal.SIGKILL)
    wait_for(lambda: all(_video(client, each)["status"] == "completed" for each in made), 200, "all six")
    last = _order(client, 7)
    wait_for(lambda: _video(client, last)["status"] == "completed", 200, "a job after the cancelled one")
    assert time.monotonic() - begun < 300  # the thousand steps of the cancelled one would take longer
    for seed in range(8, 12):
        _order(client, seed, steps=60)


def _wait_for_preview(client: httpx2.Client, id_: str) -> None:
    deadline = time.monotonic() + 120
    with client.stream("GET", f"/v1/videos/{id_}/events") as events:
        for line in events.iter_lines():
            if line.startswith("data: ") and (url := json.loads(line[6:]).get("preview")):
                assert base64.b64decode(url.partition(",")[2]).startswith(b"\xff\xd8")  # JPEG
                return
            assert time.monotonic() < deadline


def _order(client: httpx2.Client, seed: int, steps: int = 4) -> str:
    answer = client.post("/v1/videos", json={"prompt": "a red circle", "seed": seed, "steps": steps})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def _video(client: httpx2.Client, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/videos/{id_}").json()
    return found


def _videos(client: httpx2.Client) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get("/v1/videos", params={"limit": 100}).json()["data"]
    return listed


def _states(client: httpx2.Client) -> set[str]:
    return {video["status"] for video in _videos(client)}
