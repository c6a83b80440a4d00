"""The ledger: states, leases, drivers that come and go."""

import contextlib
import itertools
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs import driver_lock
from comfy_tpu.jobs import ledger as ledgers
from comfy_tpu.jobs.ledger import ATTEMPTS_MAX, LOSSES_MAX, Conflict, Counts, Ledger, LedgerError, NewJob, OutputFile
from comfy_tpu.jobs.request import Request

FILE = OutputFile("a.mp4", "00", 1)


def job(name: str, line: int = 1, **values: object) -> NewJob:
    return NewJob(name, line, Request({"prompt": name, **values}), f"{name}.mp4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite3"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    opened = Ledger(path)
    yield opened
    opened.close()


def test_from_submitted_to_done(ledger: Ledger) -> None:
    assert [each.outcome for each in ledger.submit([job("a"), job("b", 2)])] == ["new", "new"]
    (first,) = ledger.lease(1)
    assert (first.id, first.output, first.attempt) == ("a", "a.mp4", 1)
    ledger.start(["a"], "worker")
    assert ledger.counts() == Counts(submitted=1, running=1)
    assert ledger.finish("a", [FILE], {"total": 1.5})
    assert not ledger.finish("a", [FILE], {}), "once"
    assert ledger.counts() == Counts(submitted=1, done=1)
    done, waiting = ledger.results()
    assert (done["state"], done["outputs"], done["seconds"]) == (
        "done",
        [{"name": "a.mp4", "sha256": "00", "size": 1}],
        {"total": 1.5},
    )
    assert (waiting["state"], waiting["line"]) == ("submitted", 2)


def test_a_group_is_of_one_shape_and_the_one_before(ledger: Ledger) -> None:
    ledger.submit([job(f"{height}-{number}", number, height=height) for number in range(4) for height in (480, 720)])
    first = ledger.lease(3)
    assert len({each.request.shape_key for each in first}) == 1
    rest = ledger.lease(3, model_key=first[0].request.model_key, shape_key=first[0].request.shape_key)
    assert [each.request.shape_key for each in rest] == [first[0].request.shape_key], "the last one of them"
    assert len(ledger.lease(9)) == 4


def test_a_job_goes_to_the_model_of_its_newest_line(path: Path) -> None:
    """Meshes are no part of a job's identity, and are of a model that is opened."""
    for mesh in ("sp=2", "single"):
        with contextlib.closing(Ledger(path)) as ledger:
            ledger.submit([job("a", mesh=mesh)])
            ledger.fail_model(job("a", mesh="sp=2").request.model_key, "too few devices")
            assert ledger.counts() == (Counts(failed=1) if mesh == "sp=2" else Counts(submitted=1))


def test_models_change_as_rarely_as_possible(ledger: Ledger) -> None:
    ledger.submit(
        [job(f"{model}{size}{n}", n, model=model, height=size) for n in range(3) for model in "xy" for size in (1, 2)]
    )
    seen, model_key, shape_key = [], None, None
    while group := ledger.lease(2, model_key=model_key, shape_key=shape_key):
        request = group[0].request
        model_key, shape_key = request.model_key, request.shape_key
        seen.append((request.model, request.values["height"]))
    changes = sum(one != other for one, other in itertools.pairwise(seen))
    assert changes == 3, seen
    assert sum(one[0] != other[0] for one, other in itertools.pairwise(seen)) == 1


def test_three_attempts(ledger: Ledger) -> None:
    ledger.submit([job("a"), job("b", 2)])
    for attempt in range(1, ATTEMPTS_MAX + 1):
        (leased,) = ledger.lease(1)
        assert (leased.id, leased.attempt) == ("a", attempt)
        assert ledger.fail("a", "broken", is_final=False) == ("failed" if attempt == ATTEMPTS_MAX else "submitted")
    assert [each.id for each in ledger.lease(5)] == ["b"]
    assert ledger.fail("b", "never works", is_final=True) == "failed"
    assert ledger.fail("b", "again", is_final=True) is None


def test_a_job_that_kills_its_workers_is_set_aside(ledger: Ledger) -> None:
    ledger.submit([job("a")])
    for _ in range(LOSSES_MAX):
        ledger.start([each.id for each in ledger.lease(1)], "worker")
        ledger.give_back(["a"], lost=True)
    assert ledger.counts() == Counts(failed=1)
    assert next(ledger.results())["error"] == f"its worker died {LOSSES_MAX} times"


def test_what_was_not_begun_is_not_lost(ledger: Ledger) -> None:
    ledger.submit([job("a")])
    for _ in range(LOSSES_MAX + 1):
        ledger.lease(1)
        ledger.give_back(["a"], lost=True)
    assert ledger.counts() == Counts(submitted=1)


def test_started_again(path: Path) -> None:
    first = Ledger(path)
    first.submit([job(name, line) for line, name in enumerate("abcd", 1)])
    for each in first.lease(3):
        if each.id == "a":
            first.finish("a", [FILE], {})
        if each.id == "b":
            first.fail("b", "broken", is_final=True)
    first.close()
    second = Ledger(path)
    # d is gone from the file, e is new; b failed and is tried again.
    outcomes = second.submit([job("a"), job("b", 2), job("c", 3), job("e", 4)], {"a.mp4"})
    assert [each.outcome for each in outcomes] == ["done", "again", "known", "new"]
    assert second.counts() == Counts(submitted=3, done=1)
    assert sorted(each.id for each in second.lease(9)) == ["b", "c", "e"]
    second.close()


def test_an_output_that_is_gone_is_made_again(path: Path) -> None:
    first = Ledger(path)
    first.submit([job("a")])
    first.lease(1)
    first.finish("a", [FILE], {})
    first.close()
    second = Ledger(path)
    assert [each.outcome for each in second.submit([job("a")], set())] == ["again"]
    second.close()


def test_one_output_of_two_lines(ledger: Ledger) -> None:
    first, second = (NewJob(name, line, Request({"prompt": name}), "same.mp4") for line, name in enumerate("ab", 1))
    assert [each.conflict for each in ledger.submit([first, second])] == [None, Conflict("same.mp4", 1)]
    assert ledger.counts().total == 1


def test_a_changed_line_takes_over_its_output(path: Path) -> None:
    first = Ledger(path)
    first.submit([NewJob("a", 1, Request({"prompt": "a"}), "same.mp4")])
    first.close()
    second = Ledger(path)
    assert second.submit([NewJob("b", 1, Request({"prompt": "b"}), "same.mp4")])[0].conflict is None
    assert [each.id for each in second.lease(9)] == ["b"]
    second.close()


def test_two_drivers_share_the_jobs(path: Path) -> None:
    first, second = Ledger(path), Ledger(path)
    jobs = [job(str(number), number) for number in range(40)]
    first.submit(jobs)
    assert {each.outcome for each in second.submit(jobs)} == {"known"}
    taken: list[str] = []

    def work(ledger: Ledger) -> None:
        while leased := ledger.lease(3):
            for each in leased:
                assert ledger.finish(each.id, [FILE], {})
                taken.append(each.id)

    threads = [threading.Thread(target=work, args=(each,)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, taken)) == list(range(40))
    first.close()
    second.close()


CHILD = """
import os, sys
from pathlib import Path
from comfy_tpu.jobs.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.start([job.id for job in ledger.lease(5)], "worker")
os.kill(os.getpid(), 9)
"""


def test_the_jobs_of_a_killed_driver_come_back_at_once(path: Path) -> None:
    first = Ledger(path)
    first.submit([job("a")])
    subprocess.run([sys.executable, "-c", CHILD, path], check=False)
    assert first.counts() == Counts(running=1), "of the other driver"
    first.renew()
    assert [each.id for each in first.lease(1)] == ["a"]
    first.close()
    assert [each.name for each in path.parent.glob("*.lock")] == []


def test_a_driver_elsewhere_is_gone_when_its_leases_run_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ledger(path)
    first.submit([job("a")])
    first.lease(1)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE drivers SET host = 'elsewhere'")
    second = Ledger(path)
    assert second.counts() == Counts(leased=1)
    monkeypatch.setattr(ledgers, "LEASE_SECONDS", 0.0)
    second.renew()
    assert second.counts() == Counts(submitted=1)
    assert not first.finish("a", [FILE], {}), "it is not the first driver's any more"
    second.close()
    first.close()


def test_a_second_host_is_refused_before_sqlite_opens_the_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Ledger(path)) as first:
        (lock,) = path.parent.glob("*.lock")
        monkeypatch.setattr(driver_lock, "_this_host", lambda: ("node-2", "another boot"))
        with monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", None)
            with pytest.raises(LedgerError, match=f"is open on the host {os.uname().nodename}, and SQLite's log"):
                Ledger(path)
        assert list(path.parent.glob("*.lock")) == [lock]
        os.utime(lock, (0, 0))  # of a process that was killed a while ago
        Ledger(path).close()
        first.renew()
        with pytest.raises(LedgerError):
            Ledger(path)


def test_containers_of_one_machine_share_a_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = driver_lock._this_host()[1]
    with contextlib.closing(Ledger(path)):
        monkeypatch.setattr(driver_lock, "_this_host", lambda: ("a container", boot))
        Ledger(path).close()


def test_a_newer_version(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(InvalidValueError, match="ledger of version 99, written by a newer"):
        Ledger(path)


def test_what_is_no_ledger(path: Path) -> None:
    path.write_bytes(os.urandom(4096))
    with pytest.raises(LedgerError, match="not a database.*remove it"):
        Ledger(path)


def test_a_line_is_compared_with_the_jobs_of_its_name_alone(ledger: Ledger) -> None:
    """Not with all jobs of the run: that is 103 s for the 10,000 lines of a batch that is done."""
    ledger.submit([job(f"job{number}", number) for number in range(50)])
    seen: list[str] = []
    ledger._database.set_trace_callback(seen.append)
    ledger.submit([job("job7", 7)])
    ledger._database.set_trace_callback(None)
    looking = [text for text in seen if text.startswith("SELECT line FROM jobs") or "'cancelled', error" in text]
    assert len(looking) == 2
    for text in looking:
        plan = [row[3] for row in ledger._database.execute(f"EXPLAIN QUERY PLAN {text}")]
        assert not [step for step in plan if "SCAN" in step or "run=?" in step], plan
