"""What a client sends is refused before it is written, where the queue, its share or the disk is full."""

import contextlib
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comfy_tpu.jobs.served_ledger import QueueFullError
from comfy_tpu.serving import stages
from comfy_tpu.serving.config import Limits, Retention
from comfy_tpu.serving.input_room import InputRoom
from tests.serving.stand_in import running
from tests.serving.test_api import KEYS, create, png, wait_for


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The bodies of stages of which a byte was written."""
    paths = list[Path]()
    receive = stages._receive

    async def watched(request: Any, path: Path) -> str:
        paths.append(path)
        return await receive(request, path)

    monkeypatch.setattr(stages, "_receive", watched)
    return paths


def send_stage(client: Any, size: int = 1000, stage: str = "decode", **headers: str) -> tuple[int, str]:
    answer = client.post(f"/v1/stages/{stage}", content=b"x" * size, headers=headers)
    return answer.status_code, answer.json()["error"]["message"]


def send_image(client: Any) -> tuple[int, str]:
    answer = client.post("/v1/videos", data={"prompt": "a"}, files={"input_reference": ("a.png", png(64, 64))})
    return answer.status_code, answer.json()["error"]["message"]


def test_a_full_queue(tmp_path: Path, written: list[Path]) -> None:
    with running(tmp_path, limits=Limits(queued_jobs=1)) as (client, _, executor):
        wait_for(client, create(client, "wait")["id"], "in_progress")
        key = {"Idempotency-Key": "k"}
        body = {"prompt": "a"}
        known = client.post("/v1/videos", json=body, headers=key).json()["id"]
        wait_for(client, known, "in_progress")  # a worker takes two, and no third
        assert [client.post("/v1/videos", json=body).status_code for _ in range(2)] == [200, 429]
        assert send_stage(client) == (429, "1 jobs wait already; try again later")
        assert client.post("/v1/videos", json=body, headers=key).json()["id"] == known
        executor.may_go_on.set()
    assert written == []


def test_the_bytes_of_a_client(tmp_path: Path, written: list[Path]) -> None:
    """Each of two clients has half of what is kept."""
    with running(tmp_path, keys=KEYS, retention=Retention(bytes=1600)) as (client, service, _):
        bob = {"Authorization": f"Bearer {KEYS['bob']}"}
        refused = (
            "files of 0 MB are here for jobs that wait, 0 MB more were sent, and 0 MB are the most; try again later"
        )
        assert send_stage(client, 801, **bob) == (
            413,
            "the body counts as 801 bytes, and files of one client may have 800 here; send less, or a Content-Length: "
            "without it a body counts as the largest that is taken",
        )
        with service.receiving("ann", None, 500), service.receiving("bob", None, 500):  # bodies that are on their way
            assert send_stage(client, 400, **bob) == (429, refused)
            assert written == []
        assert send_stage(client, 400, **bob)[0] == 400  # no safetensors
        assert len(written) == 1
        assert send_stage(client, 400, **bob)[0] == 400  # nothing stays reserved


@pytest.mark.parametrize("path", ["/v1/stages/decode", "/v1/videos"])
def test_a_body_without_a_length_where_a_client_has_less_room(path: str, tmp_path: Path, written: list[Path]) -> None:
    """Waiting would not help."""
    with running(tmp_path, retention=Retention(bytes=2**20)) as (client, _, _):
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = client.post(path, content=iter([b"x"]), headers=headers)
        assert answer.status_code == 413
        assert "send less, or a Content-Length" in answer.json()["error"]["message"]
    assert written == []


def test_a_body_that_is_accepted_while_another_is_looked_at(tmp_path: Path) -> None:
    """It counts as one that is on its way, or as one that waits."""
    with contextlib.ExitStack() as first:

        def input_bytes() -> dict[str, int]:
            """Between this answer and its use, the first body becomes a job."""
            if not threads:
                threads.append(threading.Thread(target=first.close))
                threads[0].start()
                threads[0].join(0.2)
            return {}

        threads = list[threading.Thread]()
        room = InputRoom(SimpleNamespace(input_bytes=dict), tmp_path, 100)  # type: ignore[arg-type]
        first.enter_context(room.reserve("ann", 60))
        room._ledger.input_bytes = input_bytes  # type: ignore[method-assign]
        with pytest.raises(QueueFullError), room.reserve("ann", 60):
            pass
        threads[0].join()


def test_a_disk_without_room(tmp_path: Path, written: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (client, _, _):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**28 + 99))
        assert send_stage(client) == (503, "the server's disk has 268 MB left; try again later")
        assert send_image(client)[0] == 503
        assert send_stage(client, 99)[0] == 400
        create(client)
    assert len(written) == 1


def test_a_stage_that_does_not_exist(tmp_path: Path, written: list[Path]) -> None:
    with running(tmp_path) as (client, _, _):
        assert send_stage(client, stage="nothing")[0] == 404
    assert written == []
