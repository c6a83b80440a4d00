"""The API without a model: what is accepted, refused, shown, cancelled and removed."""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from comfy_tpu.compiler.residency import shared_residency
from comfy_tpu.jobs.served_ledger import ServedLedger
from comfy_tpu.jobs.worker_thread import GROUPS_AHEAD
from comfy_tpu.serving.config import Limits, Retention
from tests.serving.stand_in import Served, running

ROOT = Path(__file__).parents[2]
KEYS = {"ann": "a-key-of-ann-0001", "bob": "a-key-of-bob-0001"}


def create(client: Any, prompt: str = "a cat", **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/videos", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for(client: Any, id_: str, *statuses: str, path: str = "/v1/videos", **options: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        video = client.get(f"{path}/{id_}", **options).json()
        if video["status"] in statuses:
            return video
    raise AssertionError(video)


def test_a_video_from_order_to_file(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = create(client, model="demo", size="64x64", seconds="1", seed=7)
        assert (made["object"], made["size"], made["prompt"]) == ("video", "64x64", "a cat")
        video = wait_for(client, made["id"], "completed")
        assert video["progress"] == 100
        content = client.get(f"/v1/videos/{made['id']}/content")
        assert content.content == b"a cat"
        part = client.get(f"/v1/videos/{made['id']}/content", headers={"Range": "bytes=2-3"})
        assert (part.status_code, part.content) == (206, b"ca")
        assert [each["id"] for each in client.get("/v1/videos").json()["data"]] == [made["id"]]
        assert client.delete(f"/v1/videos/{made['id']}").json()["deleted"] is True
        assert client.get(f"/v1/videos/{made['id']}").status_code == 404
        assert [path.name for path in tmp_path.iterdir() if path.suffix == ".mp4"] == []


def test_a_failed_job_says_why(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        video = wait_for(client, create(client, "fail")["id"], "failed")
        assert video["error"] == {
            "code": "failed",
            "message": "ValueError: no such luck: weights.safetensors",
        }  # no path
        content = client.get(f"/v1/videos/{video['id']}/content")
        assert content.status_code == 409


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 10_001}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"model": "/etc/passwd"}, "model"),
        ({"size": "7x7"}, "size"),
        ({"size": "64x7"}, "size"),
        ({"width": 7}, "width"),
        ({"size": "../.."}, "size"),
        ({"seconds": "-1"}, "seconds"),
        ({"seconds": "nan"}, "seconds"),
        ({"steps": "many"}, "steps"),
        ({"steps": True}, "steps"),
        ({"lora": "../../secret"}, "lora"),
        ({"image": ["/etc/passwd"]}, "image"),
        ({"input_reference": {"image_url": "http://10.0.0.1/x.png"}}, "image"),
        ({"output": "../x.mp4"}, "output"),
        ({"mesh": "tp=8"}, "mesh"),
    ],
)
def test_bad_orders_are_refused_at_once(fields: dict[str, Any], param: str, shared: Served) -> None:
    client, service = shared
    answer = client.post("/v1/videos", json={"prompt": "a cat", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert service.ledger.counts().total == 0


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_orders(content: bytes, shared: Served) -> None:
    client, _ = shared
    answer = client.post("/v1/videos", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GIF89a", "damaged"),
        (png(8, 8)[:40], "damaged"),
        (png(200, 200), "pixels"),
        (png(8, 8), "begins with a prompt alone"),
    ],
)
def test_images_that_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(image_pixels=100 * 100)) as (client, _, _):
        answer = client.post("/v1/videos", data={"prompt": "x"}, files={"input_reference": ("x.png", content)})
        assert answer.status_code == 400
        assert reason in answer.json()["error"]["message"]
        assert list((tmp_path / "inputs").iterdir()) == []


def test_a_large_body_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(body_bytes=1000)) as (client, _, _):
        assert client.post("/v1/videos", json={"prompt": "x" * 2000}).status_code == 413
        parts = (b"x" * 100 for _ in range(20))  # of no announced length
        assert client.post("/v1/videos", content=parts).status_code == 413


def test_a_full_queue(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(queued_jobs=1)) as (client, _, executor):
        for _ in range(GROUPS_AHEAD):  # those that the worker takes
            wait_for(client, create(client, "wait")["id"], "in_progress")
        create(client, "wait")
        answer = client.post("/v1/videos", json={"prompt": "wait"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "10")
        executor.may_go_on.set()


def test_a_running_job_is_cancelled(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = wait_for(client, create(client, "wait")["id"], "in_progress")
        cancelled = client.post(f"/v1/videos/{made['id']}/cancel").json()
        assert (cancelled["status"], cancelled["error"]["code"]) == ("failed", "cancelled")
        wait_for(client, create(client, "another")["id"], "completed")  # the worker is free again


def test_a_key_is_needed_where_there_are_keys(tmp_path: Path) -> None:
    with running(tmp_path, keys=KEYS) as (client, _, _):
        assert client.get("/healthz").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEYS["ann"]},
            {"Authorization": "Bearer "},
        ):
            for path in ("/v1/videos", "/v1/models", "/metrics", "/openapi.json"):
                assert client.get(path, headers=headers).status_code == 401, (path, headers)
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
        made = client.post("/v1/videos", json={"prompt": "a cat"}, headers=ann).json()
        assert client.get(f"/v1/videos/{made['id']}", headers=ann).status_code == 200
        for method, path in (("get", ""), ("delete", ""), ("get", "/content"), ("post", "/cancel"), ("get", "/events")):
            answer = client.request(method, f"/v1/videos/{made['id']}{path}", headers=bob)
            assert answer.status_code == 404, path
        assert client.get("/v1/videos", headers=bob).json()["data"] == []


def test_an_order_with_a_key_is_one_job(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        headers = {"Idempotency-Key": "k"}
        first, second = (client.post("/v1/videos", json={"prompt": "a cat"}, headers=headers) for _ in range(2))
        assert first.json()["id"] == second.json()["id"]
        assert client.post("/v1/videos", json={"prompt": "a dog"}, headers=headers).status_code == 409
        assert client.post("/v1/images", json={"prompt": "a cat"}, headers=headers).status_code == 409


def test_an_order_with_a_key_is_not_refused_the_second_time(tmp_path: Path) -> None:
    """Though the queue is full by then, or the server was started with another model or limit."""
    order, headers = {"prompt": "wait", "model": "demo"}, {"Idempotency-Key": "k"}
    with running(tmp_path) as (client, _, _):
        first = client.post("/v1/videos", json=order, headers=headers).json()
    with running(tmp_path, "demo-image", limits=Limits(queued_jobs=1)) as (client, _, executor):
        while client.post("/v1/videos", data={"prompt": "wait"}, files={"image": png(8, 8)}).status_code == 200:
            pass
        assert client.post("/v1/videos", json=order, headers=headers).json()["id"] == first["id"]
        executor.may_go_on.set()


def test_events_end_with_the_job(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = create(client)
        text = client.get(f"/v1/videos/{made['id']}/events").text
        last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert (last["id"], last["status"]) == (made["id"], "completed")


def test_ready_after_a_step_and_metrics(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        wait_for(client, create(client)["id"], "completed")
        assert client.get("/readyz").status_code == 200
        assert 'comfy_tpu_finished_total{state="done"} 1' in client.get("/metrics").text


def test_metrics_show_devices_that_hold_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Mock(id=3, platform="tpu", memory_stats=lambda: {"bytes_in_use": 5, "bytes_limit": 7})
    with running(tmp_path) as (client, _, _):
        assert "comfy_tpu_device" not in client.get("/metrics").text
        monkeypatch.setattr(shared_residency(), "bytes_per_device", lambda: {chip: 4})
        assert 'comfy_tpu_device_bytes_in_use{device="3"} 5' in client.get("/metrics").text


def test_metrics_start_no_devices(tmp_path: Path) -> None:
    """A request's thread would start them, and a server whose workers are Ray's would take theirs. Here no backend can
    be started, by whatever call."""
    script = f"""
from pathlib import Path
import comfy_tpu.compiler.residency
import jax
from tests.serving.stand_in import running

with running(Path({str(tmp_path)!r})) as (client, _, _):
    print(client.get("/metrics").text)
try:
    jax.devices()
except RuntimeError:
    print("no backend")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "none", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "comfy_tpu_queue_length 0" in done.stdout
    assert done.stdout.endswith("no backend\n")


def test_jobs_go_on_in_the_next_server(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = wait_for(client, create(client, "wait")["id"], "in_progress")
        later = create(client, "a cat")
    with running(tmp_path) as (client, _, executor):
        executor.may_go_on.set()
        for id_ in (made["id"], later["id"]):
            assert wait_for(client, id_, "completed")["progress"] == 100


def test_old_and_many_files_are_removed(tmp_path: Path) -> None:
    with running(tmp_path, retention=Retention(bytes=7)) as (client, service, _):
        made = [wait_for(client, create(client, f"cat {number}")["id"], "completed") for number in range(3)]
        service.enforce_retention()  # of five bytes each
        assert [each["id"] for each in client.get("/v1/videos").json()["data"]] == [made[-1]["id"]]
    with running(tmp_path, retention=Retention(seconds=0.0)) as (client, service, _):
        service.enforce_retention()
        assert client.get("/v1/videos").json()["data"] == []
    with contextlib.closing(ServedLedger(tmp_path / ".comfy-tpu" / "ledger.sqlite3")) as ledger:
        assert ledger.counts().total == 0


def test_files_that_a_killed_server_left_are_removed(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        kept = wait_for(client, create(client)["id"], "completed")["id"]
        cancelled = create(client, "wait")["id"]
        client.post(f"/v1/videos/{cancelled}/cancel")
        removed = create(client, "wait")["id"]
        client.delete(f"/v1/videos/{removed}")
    for name in (f"{cancelled}.mp4", f"{removed}.mp4", "somebody's.mp4"):
        (tmp_path / name).write_bytes(b"")
    with running(tmp_path):
        deadline = time.monotonic() + 20
        while len(names := {path.name for path in tmp_path.glob("*.mp4")} - {"warm-up.mp4"}) > 2:
            assert time.monotonic() < deadline, names
    assert names == {f"{kept}.mp4", "somebody's.mp4"}


def test_the_event_loop_never_waits_for_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, in_loop = ServedLedger._read, list[str]()

    def watched(self: ServedLedger, query: str, values: Any = ()) -> Any:
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            asyncio.get_running_loop()
            in_loop.append(query)
        return read(self, query, values)

    monkeypatch.setattr(ServedLedger, "_read", watched)
    with running(tmp_path) as (client, _, _):
        made = create(client)["id"]
        wait_for(client, made, "completed")
        for path in ("", "?limit=1", f"/{made}", f"/{made}/content", f"/{made}/events"):
            assert client.get(f"/v1/videos{path}").status_code == 200
        client.get("/v1/stages/unknown")
        client.get("/metrics")
        client.post(f"/v1/videos/{made}/cancel")
        client.delete(f"/v1/videos/{made}")
    assert in_loop == []
