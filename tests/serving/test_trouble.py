"""A ledger that cannot be written, a full disk, a worker that dies: it is said, nothing is lost, and it passes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.jobs.ledger import LedgerError
from comfy_tpu.serving import retention, scheduler
from tests.serving import stand_in
from tests.serving.stand_in import running
from tests.serving.test_api import create, wait_for

FULL = LedgerError("the ledger /a/path cannot be used (database or disk is full)", "database or disk is full")
SAID = "the ledger cannot be used: database or disk is full"


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(scheduler, "_DISK_SECONDS", 0.3)


@pytest.mark.usefixtures("fast")
def test_a_ledger_that_cannot_be_used_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (client, service, _):
        until(lambda: service.is_ready)
        waiting = create(client)
        wait_for(client, waiting["id"], "completed")
        with monkeypatch.context() as broken:

            def fail(*_: Any, **__: Any) -> None:
                raise FULL

            broken.setattr(service.ledger, "lease_fairly", fail)
            until(lambda: service.problem)
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (503, SAID)
            assert client.get("/healthz").status_code == 200  # a restart would not help
            assert client.get(f"/v1/videos/{waiting['id']}/content").content == b"a cat"
            refused = client.post("/v1/videos", json={"prompt": "a dog"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert SAID in refused.json()["error"]["message"]
            assert "/a/path" not in ready.text + refused.text
            assert int(refused.headers["Retry-After"]) > 0
            assert "comfy_tpu_ready 0" in client.get("/metrics").text
        until(lambda: service.is_ready)
        wait_for(client, create(client)["id"], "completed")


def test_an_order_shows_that_the_ledger_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without jobs writes nothing else."""

    def fail(*_: Any, **__: Any) -> None:
        raise FULL

    with running(tmp_path) as (client, service, _):
        until(lambda: service.is_ready)
        monkeypatch.setattr(service.ledger, "accept", fail)
        answer = client.post("/v1/videos", json={"prompt": "a cat"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, f"{SAID}; try again later")
        assert client.get("/readyz").json() == {"status": SAID}


@pytest.mark.usefixtures("fast")
def test_an_outcome_that_the_ledger_did_not_take_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (client, service, _):
        until(lambda: service.is_ready)
        finish, attempts = service.ledger.finish, list[str]()

        def fail_twice(id_: str, *values: Any) -> bool:
            attempts.append(id_)
            if len(attempts) < 3:
                raise FULL
            return finish(id_, *values)

        monkeypatch.setattr(service.ledger, "finish", fail_twice)
        made = create(client)
        wait_for(client, made["id"], "completed")
        assert attempts == [made["id"]] * 3
        assert client.get(f"/v1/videos/{made['id']}/content").content == b"a cat"
        assert client.get("/metrics").text.count('comfy_tpu_finished_total{state="done"} 1')


@pytest.mark.usefixtures("fast")
def test_a_disk_without_room_for_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job waits, and is not made again and again meanwhile."""
    carry_out, begun = stand_in.Executor._carry_out, list[float]()

    def fail_at_first(self: Any, job: Any) -> Any:
        if job.request.prompt == "a cat":
            begun.append(time.monotonic())
            if len(begun) == 1:
                raise OSError(28, "No space left on device")
        return carry_out(self, job)

    monkeypatch.setattr(stand_in.Executor, "_carry_out", fail_at_first)
    with running(tmp_path) as (client, service, _):
        until(lambda: service.is_ready)
        made = create(client)
        until(lambda: service.problem)
        assert client.get("/readyz").json() == {"status": "the disk is full"}
        assert client.post("/v1/videos", json={"prompt": "a dog"}).status_code == 503
        wait_for(client, made["id"], "completed")
        assert begun[1] - begun[0] >= 0.3
        until(lambda: service.is_ready)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out, ended = stand_in.Executor._carry_out, list[bool]()

    def die(self: Any, job: Any) -> Any:
        if job.request.prompt == "die":
            raise SystemError("the device is lost")
        return carry_out(self, job)

    monkeypatch.setattr(stand_in.Executor, "_carry_out", die)
    monkeypatch.setattr(stand_in, "outcome_of_error", lambda id_, error: (_ for _ in ()).throw(error))
    with running(tmp_path, on_failure=lambda: ended.append(True)) as (client, service, _):
        until(lambda: service.is_ready)
        made = create(client, "die")
        until(lambda: service.failure)
        for path in ("/healthz", "/readyz"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "no worker is left; the log says why")
        assert client.post("/v1/videos", json={"prompt": "a cat"}).status_code == 503
        assert (ended, service.failure) == ([True], "SystemError: the device is lost")
    monkeypatch.setattr(stand_in.Executor, "_carry_out", carry_out)
    with running(tmp_path) as (client, _, _):  # the job was given back
        wait_for(client, made["id"], "completed")


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.serving.test_api import png

    def fail(self: Path, mode: str = "r", **options: Any) -> Any:
        if "w" in mode:
            raise OSError(28, "No space left on device", str(self))
        return opened(self, mode, **options)

    opened = Path.open

    with running(tmp_path, "demo-image") as (client, service, _):
        until(lambda: service.is_ready)
        monkeypatch.setattr(Path, "open", fail)
        answer = client.post("/v1/videos", data={"prompt": "a"}, files={"input_reference": ("a.png", png(8, 8))})
        monkeypatch.undo()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "No space left" in answer.json()["error"]["message"]
        assert str(tmp_path) not in answer.text
        assert service.ledger.counts().total == 0


def test_the_sweeper_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = list[bool]()

    def fail_once(self: retention.Sweeper) -> None:
        swept.append(True)
        if len(swept) == 1:
            raise FULL

    monkeypatch.setattr(retention.Sweeper, "sweep", fail_once)
    monkeypatch.setattr(retention.Sweeper.__init__, "__kwdefaults__", {"seconds": 0.01})
    with running(tmp_path):
        until(lambda: len(swept) > 2)


def test_a_job_that_another_server_cancels(tmp_path: Path) -> None:
    with running(tmp_path) as (one, first, executor_1), running(tmp_path) as (two, second, executor_2):
        until(lambda: first.is_ready and second.is_ready)
        made = wait_for(one, create(one, "wait")["id"], "in_progress")
        until(lambda: (made["id"],) in (executor_1.current_jobs, executor_2.current_jobs))
        runs_first = executor_1.current_jobs == (made["id"],)
        other, busy = (two, first) if runs_first else (one, second)
        assert other.post(f"/v1/videos/{made['id']}/cancel").json()["error"]["code"] == "cancelled"
        until(lambda: not busy.activity._at_work)  # though nobody told it to go on
        assert other.delete(f"/v1/videos/{made['id']}").status_code == 200


def test_a_server_that_comes_late_leaves_the_file_of_another(tmp_path: Path) -> None:
    """It had lost its lease, and another server was done before it."""
    with running(tmp_path) as (client, service, executor):
        until(lambda: service.is_ready)
        made = wait_for(client, create(client, "wait")["id"], "in_progress")
        service.ledger._database.execute(
            "UPDATE jobs SET driver = NULL, state = 'done', outputs = ?, finished_at = ? WHERE id = ?",
            (f'[{{"name": "{made["id"]}.mp4", "sha256": "", "size": 4}}]', time.time(), made["id"]),
        )
        executor.may_go_on.set()
        until(lambda: not service.activity._at_work)
        assert client.get(f"/v1/videos/{made['id']}/content").status_code == 200


def test_a_job_that_ends_while_it_is_deleted_leaves_no_file(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, executor):
        made = wait_for(client, create(client, "wait")["id"], "in_progress")
        seen = service.find(made["id"], "")
        assert seen is not None
        executor.may_go_on.set()
        wait_for(client, made["id"], "completed")
        service.remove(seen)  # with what was known before the end
        assert list(tmp_path.glob("video_*")) == []
