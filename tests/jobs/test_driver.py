"""A batch from lines to files, with a stand-in for the model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from comfy_tpu.cli.batch import parse_values
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.driver import Batch, Refusal
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Counts, Ledger
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.output_names import RESULTS
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.sources import InvalidLine, Line
from tests.jobs.conftest import S3
from tests.jobs.stand_in import StandInWorkers, content, find_model


class Observer:
    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.states: list[str] = []
        self.events = 0

    def refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def submitted(self, counts: Counts) -> None:
        self.first = counts

    def event(self, event: Event) -> None:
        self.events += 1

    def finished(self, outcome: Outcome, state: str, counts: Counts) -> None:
        self.states.append(state)


def parse(values: Any) -> Request:
    return parse_values(values, {})


def run(
    address: str, *prompts: str | dict[str, Any] | InvalidLine, fail: dict[str, list[Exception]] | None = None
) -> tuple[StandInWorkers, Observer, Counts]:
    folder, observer = Folder(address), Observer()
    folder.prepare()
    ledger = Ledger(folder.ledger_path)
    workers = StandInWorkers(folder, 2)
    for prompt, errors in (fail or {}).items():
        workers.fail(prompt, *errors)
    lines = [
        each if isinstance(each, InvalidLine) else Line(number, {"prompt": each} if isinstance(each, str) else each)
        for number, each in enumerate(prompts, 1)
    ]
    try:
        batch = Batch(folder, ledger, observer)
        batch.restore()
        batch.submit(lines, parse, find_model)
        try:
            counts = batch.run(workers)
        finally:
            batch.write_results()
    finally:
        ledger.close()
    return workers, observer, counts


def files(address: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(address)
    return {
        path.removeprefix(root).lstrip("/"): system.cat_file(path)
        for path in system.find(root)
        if ".comfy-tpu" not in path and not path.endswith(RESULTS)
    }


def results(address: str) -> list[dict[str, Any]]:
    with fsspec.open(f"{address}/{RESULTS}", "r") as file:
        return [json.loads(line) for line in file]


def test_every_line_is_made_once(address: str) -> None:
    _workers, observer, counts = run(address, "a cat", "a dog", "a cat")
    assert counts == Counts(done=2)
    assert sorted(files(address).values()) == sorted([content("a cat"), content("a dog")])
    assert observer.events == 2
    again, observer, counts = run(address, "a cat", "a dog", "a bird")
    assert again.ran == ["a bird"], "the others are done"
    assert observer.first == Counts(submitted=1, done=2)
    assert [(each["line"], each["state"], each["request"]["prompt"]) for each in results(address)] == [
        (1, "done", "a cat"),
        (2, "done", "a dog"),
        (3, "done", "a bird"),
    ]


def test_a_lost_ledger_is_found_again_in_the_results(address: str) -> None:
    run(address, "a cat", "a dog")
    Folder(address).ledger_path.unlink()
    workers, _, counts = run(address, "a cat", "a dog", "a bird")
    assert workers.ran == ["a bird"]
    assert counts == Counts(done=3)


def test_a_file_that_is_gone_is_made_again(address: str) -> None:
    run(address, "a cat", "a dog")
    system, root = fsspec.core.url_to_fs(address)
    name = next(name for name, data in files(address).items() if data == content("a dog"))
    system.rm_file(f"{root}/{name}")
    assert run(address, "a cat", "a dog")[0].ran == ["a dog"]


def test_failures(address: str) -> None:
    errors: dict[str, list[Exception]] = {
        "once": [RuntimeError("lost")],
        "always": [RuntimeError("1"), RuntimeError("2"), RuntimeError("3"), RuntimeError("4")],
        "wrong": [InvalidValueError("prompt is wrong")],
    }
    workers, _observer, counts = run(address, "fine", "once", "always", "wrong", fail=errors)
    assert counts == Counts(done=2, failed=2)
    assert (workers.ran.count("once"), workers.ran.count("always"), workers.ran.count("wrong")) == (2, 3, 1)
    failed = {each["request"]["prompt"]: each["error"] for each in results(address) if each["state"] == "failed"}
    assert failed == {"always": "RuntimeError: 3", "wrong": "prompt is wrong"}


def test_lines_that_are_left_out(address: str) -> None:
    _, observer, counts = run(
        address,
        "a cat",
        {"prompt": "x", "promt": "y"},
        {"prompt": "one", "output": "same.png"},
        {"prompt": "two", "output": "same.png"},
        {"prompt": "x", "output": "../x.png"},
        {"prompt": "x", "output": "/tmp/x.png"},
        {"prompt": "x", "output": "results.jsonl"},
        InvalidLine(8, "is not JSON"),
        {"prompt": "x", "output": "./"},
    )
    assert counts == Counts(done=2)
    assert [refusal.line for refusal in sorted(observer.refusals, key=lambda each: each.line)] == [2, 4, 5, 6, 7, 8, 9]
    assert (
        next(each for each in observer.refusals if each.line == 4).reason
        == "output=same.png is also that of line 3; give another name"
    )


def test_files_beside_an_output_are_nobody_elses(address: str) -> None:
    _, observer, counts = run(
        address,
        {"prompt": "two", "output": "x.mp4", "num_videos": 2},
        {"prompt": "one", "output": "x-1.mp4"},
        {"prompt": "sheet", "output": "a.mp4", "contact_sheet": "s.png"},
        {"prompt": "sheet", "output": "b.mp4", "contact_sheet": "s.png"},
        {"prompt": "image", "output": "s.png"},
        {"prompt": "frames", "output": "f/frame_%04d.png"},
        {"prompt": "frames", "output": "f/"},
        {"prompt": "frames", "output": "f/other-%04d.png"},
        {"prompt": "sheet", "output": "c.mp4", "contact_sheet": "../s.png"},
    )
    assert {refusal.line: refusal.reason for refusal in observer.refusals} == {
        2: "output=x-1.mp4 is also that of line 1; give another name",
        4: "output=b.mp4 would write s.png, as line 3 does; give another name",
        5: "output=s.png is also that of line 3; give another name",
        7: "output=f/ would write f/frame_%04d.png, as line 6 does; give another name",
        9: "contact_sheet=../s.png is outside the batch's directory; give a name inside it",
    }
    assert counts.total == 4


def test_a_line_does_not_replace_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "walk").mkdir()
    for name in ("first.png", "walk/frame_0000.png"):
        (tmp_path / name).write_bytes(b"given")
    _, observer, counts = run(
        str(tmp_path),
        {"prompt": "image", "image": str(tmp_path / "first.png"), "output": "first.png"},
        {"prompt": "frames", "video": str(tmp_path / "walk"), "output": "walk/"},
        {"prompt": "beside", "video": str(tmp_path / "walk"), "output": "walk/all.png"},
    )
    assert {refusal.line: refusal.reason for refusal in observer.refusals} == {
        1: f"output={tmp_path}/first.png would replace {tmp_path}/first.png, which is an input of this run; choose "
        "another name",
        2: f"output={tmp_path}/walk/frame_%04d.png would replace {tmp_path}/walk/frame_0000.png, which is an input of "
        "this run; choose another name",
    }
    assert counts == Counts(done=1)
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "walk/frame_0000.png").read_bytes() == b"given"


def test_a_full_disk_ends_the_batch_and_it_goes_on(address: str) -> None:
    with pytest.raises(ComfyTpuError, match="No space left.*goes on where it was"):
        run(address, "a", "b", "c", fail={"b": [OSError(28, "No space left on device")]})
    assert all(each["state"] != "failed" for each in results(address))
    workers, _, counts = run(address, "a", "b", "c")
    assert counts == Counts(done=3)
    assert "a" not in workers.ran


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.jobs.test_driver import run
run(sys.argv[1], "a", "b", "kill", "c", "d")
"""


@pytest.mark.parametrize("address", ["local", S3], indirect=True)
def test_killed_and_started_again(address: str) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((root, str(Path(root) / "src")))}
    done = subprocess.run([sys.executable, "-c", KILLED, address, root], env=environment, check=False)
    assert done.returncode == -9
    workers, _, counts = run(address, "a", "b", "c", "d")
    assert counts == Counts(done=4)
    assert set(workers.ran) == {"c", "d"}
    assert sorted(files(address).values()) == sorted(map(content, "abcd"))


def test_results_are_not_written_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RESULTS).symlink_to(other)
    Folder(str(tmp_path / "out")).write_results([{"job": 1}])
    assert other.read_text() == "mine"
    assert (tmp_path / "out" / RESULTS).read_text() == '{"job": 1}\n'


def test_a_link_out_of_the_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tmp_path / "out"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    with pytest.raises(InvalidValueError, match="outside the batch's directory, by a link"):
        Folder(str(inside)).check_inside(inside, "link/x.png")


def test_a_store_that_nothing_here_can_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: no attempt later would find what is not installed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("comfy_tpu.jobs.folder.time.sleep", lambda seconds: pytest.fail("it is tried again"))
    with pytest.raises(
        InvalidValueError, match=r"^output=nowhere://x cannot be written \(nowhere://x cannot be reached"
    ):
        Folder("nowhere://x").prepare()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match="^output=.*cannot be written"):
        Folder(str(tmp_path / "file")).prepare()
