"""A batch of two processes of two devices: the videos of one process of four, and a second start that goes on."""

import contextlib
import json
import signal
import sqlite3
import time

import numpy as np
import pytest
from PIL import Image

from tests.hosts.processes import find_port, start, start_all, wait_all
from tests.waiting import wait_for

COMMAND = ("-m", "comfy_tpu.cli", "batch")
COMMON = ("--num-frames", "5", "--steps", "2", "--mesh", "dp=2,sp=2", "--batch-size", "1")
LINES = [{"prompt": f"a {colour} circle moves right", "output": f"{colour}.npy"} for colour in ("red", "blue", "green")]


def write_jobs(directory, lines):
    (directory / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_states(out):
    """The state of each output; empty before there is a ledger."""
    address = f"file:{out / '.comfy-tpu' / 'ledger.sqlite3'}?mode=ro"
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(address, uri=True)) as database,
    ):
        return dict(database.execute("SELECT output, state FROM jobs").fetchall())
    return {}


@pytest.mark.slow
def test_the_same_videos(tmp_path):
    """Only the first host has the job file and the directory. A line that fails does not stop the others."""
    one, *places = (tmp_path / name for name in ("one", "first", "second"))
    for place in (one, *places):
        place.mkdir()
    write_jobs(one, LINES)
    (single,) = wait_all([start(*COMMAND, "jobs.jsonl", "-o", "out", *COMMON, devices=4, cwd=one)])
    assert single[0] == 0, single

    write_jobs(places[0], [*LINES, {"prompt": "x", "height": 33}, {"prompt": "x", "output": "x.avi"}, {"sede": 1}])
    port = find_port()
    join = ("--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id")
    results = wait_all(
        [
            start(*COMMAND, "jobs.jsonl", "-o", "out", *COMMON, "--json", *join, str(number), cwd=place)
            for number, place in enumerate(places)
        ]
    )
    assert [status for status, _, _ in results] == [1, 1], results  # not all are done
    assert results[1][1:] == ("", "")
    events = [json.loads(line) for line in results[0][1].splitlines()]
    assert {**events[-1], "seconds": 0} == {
        "event": "summary",
        "done": 3,
        "failed": 2,
        "open": 0,
        "refused": 1,
        "seconds": 0,
    }
    errors = [event["error"] for event in events if event["event"] == "failed"]
    assert any("height=33" in error for error in errors)
    assert any("x.avi" in error for error in errors)
    for line in LINES:
        made = (places[0] / "out" / line["output"]).read_bytes()
        assert made == (one / "out" / line["output"]).read_bytes()
    assert list(places[1].iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGINT)])
def test_the_end_of_one_ends_all_and_the_next_start_goes_on(victim, number, tmp_path):
    write_jobs(tmp_path, LINES)
    out = tmp_path / "out"
    arguments = (*COMMAND, "jobs.jsonl", "-o", "out", *COMMON)
    processes = start_all(2, *arguments, cwd=tmp_path)
    # Not for the file: it is in its place before the ledger says so, and would be made again after a kill in between.
    wait_for(lambda: "done" in read_states(out).values() or processes[0].poll() is not None)
    assert [process.poll() for process in processes] == [None, None], wait_all(processes)
    processes[victim].send_signal(number)
    began = time.monotonic()
    results = wait_all(processes, 60)
    assert time.monotonic() - began < 60
    status, printed, err = results[1 - victim]
    assert (status, printed) == (1, "")
    assert err.splitlines()[-1].startswith(f"comfy-tpu: process {victim} of 2 (")
    assert "Traceback" not in err + results[victim][2]
    done = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert 1 <= len(done) <= 3
    if (victim, number) != (0, signal.SIGKILL):  # the first host has told what is done, and left nothing behind
        told = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert {result["output"] for result in told if result["state"] == "done"} <= {*done}
        assert not list(out.glob(".*.partial"))

    results = wait_all(start_all(2, *arguments, cwd=tmp_path))
    assert [status for status, _, _ in results] == [0, 0], results
    assert "jobs are done already" in results[0][2]
    assert read_states(out) == {line["output"]: "done" for line in LINES}
    assert sorted(path.name for path in out.iterdir()) == [".comfy-tpu", *sorted([*read_states(out)]), "results.jsonl"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--workers", "2"), "--workers 2 is for workers of Ray, and --coordinator makes all hosts one worker; give"),
        (("--ray", "auto"), "--ray auto is for workers of Ray, and --coordinator makes all hosts one worker; give"),
    ],
)
@pytest.mark.slow
def test_either_ray_or_hosts(flags, sentence, tmp_path):
    write_jobs(tmp_path, LINES)
    results = wait_all(start_all(2, *COMMAND, "jobs.jsonl", "-o", "out", *flags, cwd=tmp_path))
    assert [status for status, _, _ in results] == [1, 1]
    assert results[0][2].startswith(f"comfy-tpu: {sentence}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_files_of_the_first_host_are_sent(tmp_path):
    """Images that lines name, one of them twice. A line whose image is missing fails by itself."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (64, 64), name).save(places[0] / f"{name}.png")
    names = ("red.png", "blue.png", "none.png", "red.png")
    lines = [{"prompt": "the circle moves", "image": name, "output": f"{n}.npy"} for n, name in enumerate(names)]
    write_jobs(places[0], lines)
    port = find_port()
    join = ("--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id")
    common = (*COMMON, "--model", "demo-image")
    results = wait_all(
        [
            start(*COMMAND, "jobs.jsonl", "-o", "out", *common, *join, str(number), cwd=place)
            for number, place in enumerate(places)
        ]
    )
    assert [status for status, _, _ in results] == [1, 1], results
    assert "none.png" in results[0][2]
    videos = {path.name: np.load(path) for path in (places[0] / "out").glob("*.npy")}
    assert sorted(videos) == ["0.npy", "1.npy", "3.npy"]
    np.testing.assert_array_equal(videos["0.npy"], videos["3.npy"])
    assert (videos["0.npy"] != videos["1.npy"]).any()
    assert list(places[1].iterdir()) == []
