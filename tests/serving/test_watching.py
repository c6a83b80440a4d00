"""What an operator sees of a server: metrics, logs, traces; and who may not look."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.serving.activity import Activity
from comfy_tpu.serving.logs import JsonFormatter
from comfy_tpu.serving.tracing import start_tracer
from tests import waiting
from tests.serving.stand_in import running
from tests.serving.test_api import create, wait_for


def read_metrics(client: Any) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, executor):
        wait_for(client, create(client)["id"], "completed")
        at_work = create(client, "wait")
        wait_for(client, at_work["id"], "in_progress")
        found = read_metrics(client)
        assert found['comfy_tpu_finished_total{state="done"}'] == 1
        assert found['comfy_tpu_jobs{state="running"}'] == 1
        assert found["comfy_tpu_queue_length"] == 0
        assert found["comfy_tpu_steps_total"] >= 2
        assert found['comfy_tpu_stage_seconds_total{stage="total"}'] == 1.0
        assert 0 <= found["comfy_tpu_idle_share"] < 1
        assert found["comfy_tpu_ready"] == 1
        executor.may_go_on.set()


def test_steps_and_programs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("comfy_tpu.serving.activity.time.monotonic", lambda: clock[0])
    activity = Activity()
    clock[0] += 1
    activity.begin(["a"])
    for from_cache in (True, False, False):
        program = Progress("compiling", "step", 1, 1, from_cache=from_cache)
        activity.note(Event("w", "compiling", "", 1, 1, ("a",), progress=program))
    for done, seconds in ((0, 0.0), (1, 9.0), (2, 0.2), (4, 1.0)):
        clock[0] += seconds
        activity.note(Event("w", "denoising", "", done, 4, ("a",)))
    activity.end(Outcome("a", "done", seconds={"total": 10.2, "denoising": 10.0}), "done")
    assert activity.programs == {"cached": 1, "compiled": 2}
    assert activity.steps == 3
    assert activity.step_seconds == pytest.approx(1.2)  # the first step of a job has compilation in it
    assert activity.step_counts[3:5] == [1, 2]
    clock[0] += 0.8
    assert activity.idle_share == pytest.approx(1.8 / 12.0)


def test_what_a_job_waits_for_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("comfy_tpu.serving.activity.time.monotonic", lambda: clock[0])
    activity = Activity()
    activity.begin(["a", "b"])
    for stage, what, done, seconds in (
        ("loading", "vae", 0, 0.0),
        ("loading", "vae", 5, 2.0),
        ("loading", "vae", 10, 1.0),
        ("compiling", "step", 0, 0.5),
        ("compiling", "step", 0, 0.0),  # XLA begins, the cache had none
        ("compiling", "step", 10, 7.0),
        ("compiling", "decode", 0, 0.0),
        ("compiling", "decode", 10, 4.0),
    ):
        clock[0] += seconds
        activity.note(Event("w", stage, what, done, 10, ("a",)))
    assert activity.preparation_seconds("a") == {"loading": 3.0, "compiling": 11.0}
    assert activity.preparation_seconds("b") == {}
    activity.end(Outcome("a", "done"), "done")
    assert activity.preparation_seconds("a") == {}


def test_an_estimate_leaves_out_what_the_first_job_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Activity, "preparation_seconds", lambda self, id_: {"loading": 0.25, "compiling": 0.5})
    with running(tmp_path) as (client, _, _):
        wait_for(client, create(client)["id"], "completed")  # in one second, its worker says
        estimate = waiting.wait_for(lambda: create(client)["estimated_seconds"])  # learned just after that
        assert estimate == pytest.approx(0.25)
        found = read_metrics(client)
        assert found['comfy_tpu_stage_seconds_total{stage="compiling"}'] >= 0.5
    with running(tmp_path) as (client, _, _):  # from the ledger
        assert create(client)["estimated_seconds"] == pytest.approx(0.25)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "comfy_tpu.serving")
    caplog.handler.setFormatter(JsonFormatter())

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in caplog.text.splitlines()]

    return read


@pytest.mark.parametrize("given", ["my-request.7", "", "bad id\twith spaces", "x" * 65])
def test_logs_name_request_and_job(given: str, tmp_path: Path, logged: Any) -> None:
    with running(tmp_path) as (client, _, _):
        headers = {"x-request-id": given} if given else {}
        answer = client.post("/v1/videos", json={"prompt": "a secret cat"}, headers=headers)
        used = answer.headers["x-request-id"]
        assert (used == given) is (given == "my-request.7")
        wait_for(client, answer.json()["id"], "completed")
    lines = logged()
    (accepted,) = [line for line in lines if "accepted" in line["message"]]
    assert (accepted["request"], accepted["job"]) == (used, answer.json()["id"])
    (ended,) = [line for line in lines if line.get("method") == "POST"]
    assert (ended["path"], ended["status"], ended["request"]) == ("/v1/videos", 200, used)
    assert "secret" not in json.dumps(lines)


def test_prompts_are_logged_where_that_is_asked(tmp_path: Path, logged: Any) -> None:
    with running(tmp_path, logs_prompts=True) as (client, _, _):
        create(client, "a secret cat")
    assert [line["prompt"] for line in logged() if "prompt" in line] == ["a secret cat"]


def test_spans(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="make test does without OpenTelemetry: make test-serve")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    caller = "0af7651916cd43dd8448eb211c80319c"
    with running(tmp_path, tracer=provider.get_tracer("test")) as (client, _, _):
        headers = {"traceparent": f"00-{caller}-b7ad6b7169203331-01"}
        made = client.post("/v1/videos", json={"prompt": "a cat"}, headers=headers).json()
        wait_for(client, made["id"], "completed")
    spans = exporter.get_finished_spans()
    (request,) = [span for span in spans if span.name == "POST request"]
    assert f"{request.context.trace_id:032x}" == caller
    (job,) = [span for span in spans if span.name == "job"]
    assert dict(job.attributes) == {"job.id": made["id"], "job.state": "done"}
    assert (job.end_time - job.start_time) / 1e9 == pytest.approx(1.0)


def test_no_spans_where_nobody_wants_them() -> None:
    assert start_tracer({}) is None


@pytest.mark.default_cases("headers1-200", "headers6-403", "headers9-200")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_order_nothing(headers: dict[str, str], status: int, tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        answer = client.post("/v1/videos", json={"prompt": "a cat"}, headers=headers)
        assert answer.status_code == status, answer.text
        assert len(client.get("/v1/videos").json()["data"]) == (status == 200)
    with running(tmp_path / "keys", keys={"ann": "a-key-of-ann-0001"}) as (client, _, _):  # who has a key may
        allowed = {**headers, "authorization": "Bearer a-key-of-ann-0001"}
        assert client.post("/v1/videos", json={"prompt": "a cat"}, headers=allowed).status_code == 200


def test_a_first_step_that_fails_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.serving import stand_in

    def fail(self: Any, job: Any) -> Any:
        raise ValueError("no devices")

    monkeypatch.setattr(stand_in.Executor, "_carry_out", fail)
    ended = []
    with stand_in.running(tmp_path, on_failure=lambda: ended.append(True)) as (client, service, _):
        while not service.failure:
            pass
        assert client.get("/readyz").status_code == 503
    assert service.failure == "ValueError: no devices"
    assert ended == [True]
