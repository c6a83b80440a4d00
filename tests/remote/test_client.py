"""The client against servers that answer as they should not, in threads of this process."""

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.remote import runner as remote_runner
from comfy_tpu.remote.client import RefusedError, ServerClient, UnreachableError
from comfy_tpu.remote.keys import Address, parse_address
from comfy_tpu.remote.runner import _ABANDONED, Callbacks, FailedError, LostError, StageRunner, read_progress

KEY = "the-secret-key-0001"
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[Address]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                answer(self)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield parse_address(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(handler: Any, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if "length" not in headers:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def error(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "param": param}}).encode()


def test_a_redirect_is_not_followed_and_gets_no_key() -> None:
    asked: list[str] = []
    with (
        answering(lambda handler: asked.append("elsewhere")) as elsewhere,
        answering(lambda handler: reply(handler, 307, Location=f"{elsewhere}/v1/models")) as address,
        pytest.raises(RefusedError, match="sends to another address"),
    ):
        ServerClient(address, KEY).ask("GET", "/v1/models")
    assert asked == []


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (lambda handler: reply(handler, 401, error("no")), RefusedError, "refuses the key, or wants one"),
        (lambda handler: reply(handler, 400, error("height=7", "height")), RefusedError, "refuses: height=7"),
        (lambda handler: reply(handler, 404), RefusedError, "no server of comfy-tpu"),
        (lambda handler: reply(handler, 200, b"<html>"), RefusedError, "no JSON"),
        (lambda handler: reply(handler, 200, b"[]"), RefusedError, "no JSON"),
        (lambda handler: reply(handler, 502, b"<html>"), UnreachableError, "is not there"),
        (lambda handler: reply(handler, 503, error("the disk is full")), RefusedError, "the disk is full"),
        (lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n"), UnreachableError, "does not answer"),
        (lambda handler: time.sleep(1.5), UnreachableError, "timed out"),
        (lambda handler: reply(handler, 200, b"x" * 20 * 2**20), RefusedError, "are the most"),
    ],
)
def test_answers_that_are_none(answer: Answer, kind: type[ComfyTpuError], message: str) -> None:
    with answering(answer) as address:
        with pytest.raises(kind, match=message) as caught:
            ServerClient(address, KEY, answer_seconds=0.5).ask("GET", "/v1/models")
        assert KEY not in str(caught.value)
        assert caught.value.__cause__ is None or KEY not in str(caught.value.__cause__)


def test_a_download_that_ends_early() -> None:
    def answer(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 10)

    with answering(answer) as address, pytest.raises(UnreachableError):
        ServerClient(address).download("/content", 2**20)


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = parse_address(f"http://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(UnreachableError, match="does not answer"):
            ServerClient(address).ask("GET", "/v1/models")


def test_a_certificate_of_nobody_is_refused() -> None:
    with answering(lambda handler: None) as address:
        secure = parse_address(f"https://127.0.0.1:{address.port}")
        with pytest.raises(ComfyTpuError, match="does not answer|certificate"):
            ServerClient(secure, KEY, answer_seconds=1).ask("GET", "/v1/models")


class Stages:
    """A server whose job makes three steps, and goes away or fails where it is told to."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.posts: list[tuple[str, str]] = []
        self.fails_post = 0
        self.final: dict[str, Any] = {"status": "completed", "error": None}
        self.is_lost = False
        self.waits = threading.Event()
        self.waits.set()

    def __call__(self, handler: Any) -> None:
        path = handler.path
        if path.endswith("/cancel"):
            self.cancelled.append(path.split("/")[-2])
            reply(handler, 200, b"{}")
        elif path == "/v1/stages/denoise":
            body = handler.rfile.read(int(handler.headers["Content-Length"]))
            self.posts.append((handler.headers["Idempotency-Key"], body.decode()))
            if self.fails_post:
                self.fails_post -= 1
                reply(handler, 502)
            else:
                reply(handler, 200, b'{"id": "job1"}')
        elif path.endswith("/events"):
            self.events(handler)
        elif path.endswith("/content"):
            reply(handler, 200, b"latents")
        elif self.is_lost:
            reply(handler, 404, error("there is no stage"))
        else:
            reply(handler, 200, json.dumps(self.final).encode())

    def events(self, handler: Any) -> None:
        if self.is_lost:
            reply(handler, 404, error("there is no stage"))
            return
        handler.send_response(200)
        handler.end_headers()
        for step in (1, 2, 3):
            progress = {"stage": "denoising", "what": "", "done": step, "total": 3, "size": "64×64×17", "odd": [1]}
            handler.wfile.write(b": alive\n\nevent: stage\ndata: ")
            handler.wfile.write(json.dumps({"status": "in_progress", "progress": progress}).encode() + b"\n\n")
            handler.wfile.flush()
        self.waits.wait(10)
        handler.wfile.write(b"data: " + json.dumps(self.final).encode() + b"\n\n")


def run(address: Address, callbacks: Callbacks | None = None, wait_seconds: float = 5.0) -> bytes:
    runner = StageRunner(
        ServerClient(address, KEY, answer_seconds=1), callbacks or Callbacks(), wait_seconds=wait_seconds
    )
    return runner.run("denoise", b"input", 2**20)


def test_a_stage_and_its_steps() -> None:
    steps: list[int] = []
    stages = Stages()
    with answering(stages) as address:
        assert run(address, Callbacks(lambda progress: steps.append(progress.done))) == b"latents"
    assert steps == [1, 2, 3]
    assert stages.cancelled == []


@pytest.mark.parametrize(
    ("end", "reported"),
    [
        (None, [1, 2, 3]),
        (Progress("denoising", "", 3, 3), [1, 2, 3]),  # an event has said it
        (Progress("decoding", "", 9, 9), [1, 2, 3, 9]),
    ],
)
def test_the_end_of_a_stage_is_reported_once(end: Progress | None, reported: list[int]) -> None:
    steps: list[int] = []
    with answering(Stages()) as address:
        runner = StageRunner(ServerClient(address), Callbacks(lambda progress: steps.append(progress.done)))
        runner.run("denoise", b"input", 2**20, end)
    assert steps == reported


def test_a_body_whose_answer_is_lost_is_sent_again_as_the_same_job() -> None:
    stages, waited = Stages(), list[float]()
    stages.fails_post = 2
    with answering(stages) as address:
        assert run(address, Callbacks(on_waiting=waited.append)) == b"latents"
    assert len(stages.posts) == 3
    assert len(set(stages.posts)) == 1
    assert len(waited) == 2


@pytest.mark.parametrize(
    ("final", "message"),
    [
        ({"status": "failed", "error": {"message": "denoising gave NaN"}}, "failed: denoising gave NaN"),
        ({"status": "cancelled", "error": {"message": "by the operator"}}, "cancelled the job"),
        ({"status": "failed", "error": None}, "does not say why"),
    ],
)
def test_a_stage_that_fails(final: dict[str, Any], message: str) -> None:
    stages = Stages()
    stages.final = final
    with answering(stages) as address, pytest.raises(FailedError, match=message):
        run(address)


def test_a_server_that_no_longer_knows_the_job() -> None:
    stages = Stages()
    stages.is_lost = True
    with answering(stages) as address, pytest.raises(FailedError, match="no longer knows this job"):
        run(address)


def test_cancel_does_not_wait_for_the_next_event() -> None:
    stages, moments = Stages(), list[float]()
    stages.waits.clear()

    def check() -> None:
        if moments and time.monotonic() - moments[0] > 0.3:
            raise KeyboardInterrupt

    with answering(stages) as address:
        with pytest.raises(KeyboardInterrupt):
            run(address, Callbacks(lambda progress: moments.append(time.monotonic()), check))
        assert time.monotonic() - moments[0] < 2
        assert stages.cancelled == ["job1"]
        stages.waits.set()


@pytest.mark.parametrize("hangs", ["/denoise", "/events", "/content"])
def test_cancel_does_not_wait_for_a_server_that_hangs(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_runner, "_CANCEL_SECONDS", 0.5)
    stages, hung, may_go_on = Stages(), threading.Event(), threading.Event()

    def answer(handler: Any) -> None:
        if handler.path.endswith((hangs, "/cancel")) and not may_go_on.is_set():
            hung.set()
            may_go_on.wait(20)
        stages(handler)

    def check() -> None:
        if hung.is_set():
            raise KeyboardInterrupt

    with answering(answer) as address:
        runner = StageRunner(ServerClient(address, answer_seconds=20), Callbacks(check=check))
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            runner.run("denoise", b"input", 2**20)
        assert time.monotonic() - began < 6
        may_go_on.set()
        deadline = time.monotonic() + 10
        while not stages.cancelled and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stages.cancelled == ["job1"]  # also where the job was accepted after all


def test_a_server_that_goes_away_for_good_and_comes_back_for_the_next_stage() -> None:
    stages = Stages()
    stages.waits.clear()
    with contextlib.ExitStack() as running:
        address = running.enter_context(answering(stages))
        steps: list[int] = []

        def report(progress: Any) -> None:
            steps.append(progress.done)
            if progress.done == 3:
                stages.waits.set()
                stages.final = {"status": "in_progress"}
                running.close()

        with pytest.raises(LostError, match=r"at step 3/3, and was not back within 1 s; start it again") as caught:
            run(address, Callbacks(report), wait_seconds=1.0)
        assert KEY not in str(caught.value)
    assert _ABANDONED.pop(str(address)) == {"job1"}
    again = Stages()
    with answering(again) as address:
        _ABANDONED[str(address)] = {"job0"}
        run(address)
    assert again.cancelled == ["job0"]


@pytest.mark.parametrize(
    "given", [None, 3, {}, {"stage": "x"}, {"stage": "denoising", "what": 1, "done": "x", "total": 2}]
)
def test_progress_that_is_none(given: Any) -> None:
    assert read_progress(given) is None
