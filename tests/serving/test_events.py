"""Events: news, comments where there are none, and their end: with the job, its deletion, or the server."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.jobs.worker_thread import GROUPS_AHEAD
from comfy_tpu.serving import event_streams
from comfy_tpu.serving.api import make_app
from comfy_tpu.serving.connections import make_server
from tests.families import small_flux
from tests.serving.stand_in import Executor, running
from tests.serving.test_api import create, wait_for
from tests.serving.test_hostile import connect, head, read_all, status_of


@contextlib.contextmanager
def following(client: Any, id_: str) -> Iterator[Callable[[], str]]:
    """A thread that reads the events of a job; the text, when they have ended."""
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(client.get(f"/v1/videos/{id_}/events").text))
    thread.start()

    def read() -> str:
        thread.join(20)
        return texts[0]

    yield read
    thread.join(20)


def test_a_stream_without_news_says_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams.stream_events, "__kwdefaults__", {"alive_seconds": 0.1, "during": None})
    with running(tmp_path) as (client, _, executor):
        first = wait_for(client, create(client, "wait")["id"], "in_progress")
        waiting = [create(client) for _ in range(GROUPS_AHEAD)][-1]
        with following(client, waiting["id"]) as read:
            time.sleep(1.0)
            executor.may_go_on.set()
            text = read()
        assert text.count(": alive\n\n") >= 2
        statuses = [json.loads(line[6:])["status"] for line in text.splitlines() if line.startswith("data: ")]
        assert (statuses[0], statuses[-1]) == ("queued", "completed")
        answer = client.get(f"/v1/videos/{first['id']}/events")
        assert (answer.headers["X-Accel-Buffering"], answer.headers["Cache-Control"]) == ("no", "no-store")


def test_a_browser_does_not_connect_again_for_ever(tmp_path: Path) -> None:
    """An EventSource does, with the last id that it saw, until it is answered with 204."""
    with running(tmp_path) as (client, _, _):
        made = wait_for(client, create(client)["id"], "completed")
        path = f"/v1/videos/{made['id']}/events"
        assert "\nid: last\n" in client.get(path).text
        assert client.get(path, headers={"Last-Event-ID": "last"}).status_code == 204
        assert client.get(path, headers={"Last-Event-ID": "other"}).status_code == 200


def test_the_stream_of_a_deleted_job_ends(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = wait_for(client, create(client, "wait")["id"], "in_progress")
        with following(client, made["id"]) as read:
            time.sleep(0.3)
            client.delete(f"/v1/videos/{made['id']}")
            assert '"status": "completed"' not in read()
        assert client.get(f"/v1/videos/{made['id']}/events").status_code == 404


@contextlib.contextmanager
def stoppable(directory: Path, model: str = "demo") -> Iterator[tuple[int, Any, Executor, Callable[[], None]]]:
    """A port, the service, its executor, and what tells the HTTP server to end and waits for it."""
    with running(directory, model) as (_, service, executor), socket.create_server(("127.0.0.1", 0)) as opened:
        server = make_server(make_app(service))
        service.is_stopping = lambda: server.should_exit
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join(8)  # less than a download would have
            assert not thread.is_alive()

        try:
            yield opened.getsockname()[1], service, executor, stop
        finally:
            server.should_exit = True
            thread.join(20)


def post(port: int, path: str, body: dict[str, Any], *headers: str) -> socket.socket:
    content = json.dumps(body)
    fields = ("Content-Type: application/json", f"Content-Length: {len(content)}", *headers)
    return connect(port, head(port, f"POST {path}", *fields) + content.encode())


def test_a_server_that_ends_does_not_wait_for_jobs(tmp_path: Path) -> None:
    """Those who follow one are let go; after the restart, it is there."""
    with stoppable(tmp_path) as (port, service, _, stop):
        answer = read_all(post(port, "/v1/videos", {"prompt": "wait"}, "Connection: close"))
        made = json.loads(answer.partition(b"\r\n\r\n")[2])
        events = connect(port, head(port, f"GET /v1/videos/{made['id']}/events", "Connection: close"))
        events.recv(10)
        stop()
        read_all(events)
        assert service.find(made["id"], "").state in ("submitted", "leased", "running")


def only_image(service: Any) -> Any:
    deadline = time.monotonic() + 20
    while not (records := service.ledger.list_jobs(None, "image", limit=2)) or records[0].state == "submitted":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (record,) = records
    return record


def test_who_waits_for_an_image_is_told_that_the_server_ends(tmp_path: Path) -> None:
    with stoppable(tmp_path, str(small_flux.directory("dev"))) as (port, service, _, stop):
        waiting = post(port, "/v1/images/generations", {"prompt": "wait"})
        record = only_image(service)
        stop()
        answer = read_all(waiting)
        assert status_of(answer) == 503
        assert record.id.encode() in answer


@pytest.mark.default_cases("k")
@pytest.mark.parametrize("key", ["", "k"])
def test_an_image_whose_client_has_gone(key: str, tmp_path: Path) -> None:
    """It is cancelled, unless the client can ask for it again by its key."""
    with stoppable(tmp_path, str(small_flux.directory("dev"))) as (port, service, executor, _):
        headers = [f"Idempotency-Key: {key}"] if key else []
        waiting = post(port, "/v1/images/generations", {"prompt": "wait"}, *headers)
        record = only_image(service)
        waiting.close()
        time.sleep(0.5)
        executor.may_go_on.set()
        deadline = time.monotonic() + 20
        while (state := service.find(record.id, "").state) not in ("done", "cancelled"):
            assert time.monotonic() < deadline
        assert state == ("done" if key else "cancelled")
        if key:
            again = post(port, "/v1/images/generations", {"prompt": "wait"}, *headers, "Connection: close")
            answer = read_all(again)
            assert status_of(answer) == 200
            assert record.id.encode() in answer
