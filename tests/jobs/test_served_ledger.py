"""The ledger of a server: nothing accepted is lost, nobody waits for somebody's hundred jobs."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.jobs.ledger import NewJob, OutputFile
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.served_ledger import KeyUsedError, Order, QueueFullError, ServedLedger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[ServedLedger]:
    with contextlib.closing(ServedLedger(tmp_path / "ledger.sqlite3")) as ledger:
        yield ledger


def accept(
    ledger: ServedLedger, id_: str, client: str = "ann", key: str | None = None, rows: int = 8, **values: Any
) -> str:
    request = Request({"prompt": id_, **values})
    order = Order(client, "video", key, request.to_json(), rows=rows)
    return ledger.accept(NewJob(id_, 0, request, f"{id_}.mp4"), order, queue_limit=values.pop("limit", 100))


def ids(jobs: Any) -> list[str]:
    return [job.id for job in jobs]


def test_what_was_accepted_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    first = ServedLedger(path)
    for id_ in ("a", "b", "c"):
        accept(first, id_)
    (job,) = first.lease_fairly(1)
    first.start([job.id], "local")
    first._driver_lock.release()  # what the system does when a process is killed
    with contextlib.closing(ServedLedger(path)) as second:
        assert second.run == first.run
        assert second.counts().submitted == 3
        assert ids(second.lease_fairly(3)) == ["a", "b", "c"]


def test_two_servers_share_the_jobs(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with contextlib.closing(ServedLedger(path)) as one, contextlib.closing(ServedLedger(path)) as other:
        for id_ in ("a", "b"):
            accept(one, id_)
        taken = ids(one.lease_fairly(1)), ids(other.lease_fairly(2))
        assert taken == (["a"], ["b"])
        assert other.find("a") is not None


def test_clients_take_turns(ledger: ServedLedger) -> None:
    for number in range(4):
        accept(ledger, f"ann{number}", "ann")
    accept(ledger, "bob0", "bob")
    accept(ledger, "eve0", "eve")
    assert ids(ledger.lease_fairly(1)) == ["ann0"]
    assert ids(ledger.lease_fairly(4)) == ["bob0", "eve0", "ann1", "ann2"]


def test_no_more_are_leased_than_share_a_step(ledger: ServedLedger) -> None:
    for number in range(5):
        accept(ledger, f"ann{number}", "ann", rows=2)
    assert ids(ledger.lease_fairly(8)) == ["ann0", "ann1"]
    accept(ledger, "bob0", "bob", rows=2)
    assert ids(ledger.lease_fairly(8)) == ["bob0", "ann2"]


def test_jobs_of_one_shape_go_together(ledger: ServedLedger) -> None:
    accept(ledger, "small", "ann")
    accept(ledger, "large", "ann", height=720)
    accept(ledger, "small too", "bob")
    assert ids(ledger.lease_fairly(8)) == ["small", "small too"]
    assert ids(ledger.lease_fairly(8)) == ["large"]
    assert ledger.lease_fairly(8) == []


def test_among_equals_the_shape_that_is_compiled_goes_first(ledger: ServedLedger) -> None:
    accept(ledger, "large", "ann", height=720)
    accept(ledger, "small", "bob")
    shape = Request({"prompt": "other"}).shape_key
    assert ids(ledger.lease_fairly(1, shape_key=shape)) == ["small"]


def test_the_model_that_is_loaded_goes_first(ledger: ServedLedger) -> None:
    for number in range(2):
        accept(ledger, f"large{number}", "ann", rows=1, model="large")
        accept(ledger, f"small{number}", "bob", rows=1, model="small")
    key = Request({"prompt": "other", "model": "small"}).model_key
    leased = [ids(ledger.lease_fairly(1, model_key=each)) for each in (key, key, key, None)]
    assert leased == [["small0"], ["small1"], ["large0"], ["large1"]]


def test_a_key_makes_one_job(ledger: ServedLedger) -> None:
    assert accept(ledger, "a", key="k") == "a"
    request = Request({"prompt": "a"})
    again = NewJob("b", 0, request, "b.mp4")
    assert ledger.accept(again, Order("ann", "video", "k", request.to_json()), queue_limit=100) == "a"
    assert ledger.accept(again, Order("bob", "video", "k", request.to_json()), queue_limit=100) == "b"
    assert ledger.counts().submitted == 2
    with pytest.raises(KeyUsedError):
        accept(ledger, "c", key="k", seed=7)


def test_a_full_queue_takes_nothing(ledger: ServedLedger) -> None:
    accept(ledger, "a")
    request = Request({"prompt": "b"})
    with pytest.raises(QueueFullError, match="1 jobs wait"):
        ledger.accept(NewJob("b", 0, request, "b.mp4"), Order("ann", "video", None, ""), queue_limit=1)
    assert ledger.find("b") is None


@pytest.mark.parametrize("state", ["submitted", "leased", "running"])
def test_cancelling(ledger: ServedLedger, state: str) -> None:
    accept(ledger, "a")
    if state != "submitted":
        ledger.lease_fairly(1)
    if state == "running":
        ledger.start(["a"], "local")
    assert ledger.cancel("a", "by its client") == state
    record = ledger.find("a")
    assert record is not None
    assert (record.state, record.error) == ("cancelled", "by its client")
    assert not ledger.finish("a", [], {})  # its worker comes too late
    assert ledger.lease_fairly(1) == []
    assert ledger.cancel("a", "again") == "cancelled"
    assert ledger.cancel("unknown", "") is None


def test_clients_see_their_own_jobs(ledger: ServedLedger) -> None:
    for number in range(3):
        accept(ledger, f"ann{number}", "ann")
    accept(ledger, "bob0", "bob")
    assert ids(ledger.list_jobs("ann", "video", limit=2)) == ["ann2", "ann1"]
    assert ids(ledger.list_jobs("ann", "video", limit=2, after="ann1")) == ["ann0"]
    assert ids(ledger.list_jobs("ann", "video", limit=9, after="ann0", newest_first=False)) == ["ann1", "ann2"]
    assert ids(ledger.list_jobs("ann", "image", limit=9)) == []
    assert ids(ledger.list_jobs(None, "video", limit=9)) == ["bob0", "ann2", "ann1", "ann0"]
    assert ledger.find("bob0", "ann") is None


def test_what_is_done_is_kept_and_removed(ledger: ServedLedger) -> None:
    accept(ledger, "a", key="k")
    ledger.lease_fairly(1)
    ledger.start(["a"], "local")
    assert ledger.finish("a", [OutputFile("a.mp4", "00", 12)], {"total": 1.5})
    record = ledger.find("a")
    assert record is not None
    assert (record.state, record.outputs[0].size, record.seconds) == ("done", 12, {"total": 1.5})
    assert (ledger.finished_beyond(12), ledger.finished_beyond(11)) == ([], ["a"])
    assert record.finished_at is not None
    assert ids(ledger.finished_before(record.finished_at + 1)) == ["a"]
    ledger.remove("a")
    assert ledger.find("a") is None
    assert accept(ledger, "b", key="k") == "b"


def test_the_place_in_the_queue(ledger: ServedLedger) -> None:
    for id_ in ("a", "b", "c"):
        accept(ledger, id_)
    ledger.lease_fairly(1)
    assert [ledger.position(id_) for id_ in ("b", "c")] == [0, 1]
    accept(ledger, "bob0", "bob")
    accept(ledger, "bob1", "bob")  # its turn is that of ann's second job, which came before
    assert [ledger.position(id_) for id_ in ("bob0", "b", "bob1", "c")] == [0, 1, 2, 3]
    assert [ledger.seconds_ahead(id_, 2.0) for id_ in ("bob0", "b", "bob1", "c")] == [1.0, 3.0, 5.0, 7.0]


def finish(ledger: ServedLedger, id_: str, client: str, size: int) -> None:
    accept(ledger, id_, client)
    ledger.lease_fairly(1)
    assert ledger.finish(id_, [OutputFile(f"{id_}.mp4", "00", size)], {})


@pytest.mark.parametrize(
    ("most", "gone"),
    [(100, []), (60, []), (59, ["ann0"]), (40, ["ann0", "ann1"]), (20, ["ann0", "ann1", "ann2", "bob0"])],
)
def test_who_has_the_most_bytes_makes_room(ledger: ServedLedger, most: int, gone: list[str]) -> None:
    finish(ledger, "bob0", "bob", 10)
    for number in range(4):
        finish(ledger, f"ann{number}", "ann", 10)
    finish(ledger, "bob1", "bob", 10)
    assert sorted(ledger.finished_beyond(most)) == gone


def test_what_clients_sent_counts_until_the_job_is_over(ledger: ServedLedger) -> None:
    finish(ledger, "a", "ann", 10)
    request = Request({"prompt": "b"})
    ledger.accept(NewJob("b", 0, request, "b.mp4"), Order("ann", "video", None, "", input_bytes=5), queue_limit=9)
    assert (ledger.input_bytes(), ledger.finished_beyond(14)) == ({"ann": 5}, ["a"])
    ledger.cancel("b", "")
    assert (ledger.input_bytes(), ledger.finished_beyond(14)) == ({}, [])


def test_the_bytes_of_an_older_servers_jobs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with contextlib.closing(ServedLedger(path)) as ledger:
        finish(ledger, "a", "ann", 10)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP INDEX served_by_bytes")
        database.execute("ALTER TABLE served DROP COLUMN output_bytes")
        database.commit()
    with contextlib.closing(ServedLedger(path)) as ledger:
        assert (ledger.finished_beyond(10), ledger.finished_beyond(9)) == ([], ["a"])


def test_a_look_does_not_wait_for_another(ledger: ServedLedger) -> None:
    accept(ledger, "a")
    with ledger._borrow_reader():  # of a slow query in another thread
        assert ledger.find("a") is not None
