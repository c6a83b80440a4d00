"""Hostile surroundings: each is tried, and the table says by which test."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.stored.entries import trim_files
from comfy_tpu.jobs import ledger as ledgers
from comfy_tpu.jobs.ledger import Counts, Ledger, NewJob
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.served_ledger import Order, ServedLedger
from comfy_tpu.pipeline import media, video
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from tests.cli.fake_pipeline import FakePipeline

ROOT = Path(__file__).parents[1]
PROMPT = "a red circle moving right on a black background"
HERE = "tests/test_environments.py"

ENVIRONMENTS: Mapping[str, Sequence[str]] = {
    "two processes on the same output, cache and model directory": (
        f"{HERE}::test_two_processes_share_output_cache_and_model",
        "tests/jobs/test_ledger.py::test_two_drivers_share_the_jobs",
        "tests/compiler/test_stored.py::test_threads_that_write_the_same_entry_leave_a_whole_one",
    ),
    "a user without rights": (f"{HERE}::test_a_user_without_rights",),
    "a read-only home": (f"{HERE}::test_a_read_only_home",),
    "a read-only cache": (
        f"{HERE}::test_a_cache_of_another_user",
        "tests/compiler/test_cache.py::test_a_directory_that_can_only_be_read_is_read",
        "tests/compiler/test_stored.py::test_a_cache_that_can_only_be_read_is_read_and_left_as_it_is",
    ),
    "SIGHUP": (
        "tests/cli/test_generate.py::test_interrupt",
        "tests/cli/test_generate.py::test_signal_handlers_are_put_back",
    ),
    "| head": ("tests/cli/test_streams.py::test_streams_that_fail",),
    "/dev/full": ("tests/cli/test_streams.py::test_streams_that_fail", f"{HERE}::test_an_output_on_a_full_disk"),
    "a clock that jumps": (
        f"{HERE}::test_a_clock_that_jumps_while_a_video_is_made",
        f"{HERE}::test_a_clock_that_jumps_takes_no_job_from_a_driver",
        f"{HERE}::test_a_clock_that_jumps_back_leaves_ids_of_a_server_in_order",
        f"{HERE}::test_cache_files_from_the_future_are_removed_last",
    ),
    "spawned processes": (f"{HERE}::test_spawned_processes",),
    "one pipeline per thread": (
        f"{HERE}::test_one_pipeline_per_thread",
        "tests/bridge/test_scope.py::test_two_threads_trace_at_once",
    ),
}


def test_the_table_names_tests_that_are_there() -> None:
    for environment, tests in ENVIRONMENTS.items():
        assert tests, environment
        for test in tests:
            file, _, name = test.partition("::")
            found = {
                node.name for node in ast.parse((ROOT / file).read_bytes()).body if isinstance(node, ast.FunctionDef)
            }
            assert name in found, f"{environment}: {test} is not there"


def start(arguments: Sequence[str], cwd: Path, before: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """The command with the pipeline that runs in milliseconds."""
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [*before, sys.executable, str(ROOT / "tests" / "cli" / "fake_pipeline.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **paths, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        out, error = process.communicate(timeout=600)
    assert "Traceback" not in error, error
    return process.returncode, out, error


# users and homes

# Reads everything, as the interpreter of the tests may be in somebody's home, and writes as nobody does.
_NOBODY = (
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"),
)


def as_nobody() -> Sequence[str]:
    if os.geteuid() != 0:
        return ()  # the user of the tests has no rights either
    try:
        can = subprocess.run([*_NOBODY, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        can = False
    if not can:
        pytest.skip(
            "root runs the tests, and there is no setpriv that drops its rights: install util-linux, or run as a user"
        )
    return _NOBODY


def _let_others_pass(directory: Path) -> None:
    """Another user may go through `directory` and those above it to what it may read there."""
    for path in (directory, *directory.parents):
        if path.stat().st_uid == os.geteuid() and len(path.parts) > 2:
            path.chmod(path.stat().st_mode | 0o111)


@pytest.mark.slow
def test_a_user_without_rights(tmp_path: Path) -> None:
    """In a folder of its own everything works; in another's, one sentence, and nothing is left."""
    before = as_nobody()
    _let_others_pass(tmp_path)
    own, others = tmp_path / "own", tmp_path / "others"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    others.mkdir()
    others.chmod(0o555)
    status, out, error = finish(start(("generate", PROMPT, "-o", "x.gif"), own, before, HOME=str(others)))
    assert (status, out) == (0, "x.gif\n"), error
    assert media.read_metadata(own / "x.gif")["prompt"] == PROMPT
    status, out, error = finish(start(("generate", PROMPT, "-o", str(others / "x.gif")), own, before, HOME=str(others)))
    assert (status, out) == (1, "")
    assert "--output" in error
    assert list(others.iterdir()) == []


@pytest.mark.slow
def test_a_read_only_home(tmp_path: Path) -> None:
    """The demo model on XLA, with no place for the compile cache: a warning, and the video."""
    before = as_nobody()
    _let_others_pass(tmp_path)
    home, own = tmp_path / "home", tmp_path / "own"
    home.mkdir(mode=0o555)
    own.mkdir()
    own.chmod(0o777)
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PYTHONPATH": str(ROOT / "src")}
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = ("-m", "comfy_tpu.cli", "generate", PROMPT, "--steps", "1", "--num-frames", "5", "-o", "x.gif")
    done = subprocess.run(
        [*before, sys.executable, *command],
        cwd=own,
        env={**kept, **places, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "x.gif\n"), done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(home.iterdir()) == []


@pytest.mark.slow  # by default: the tests of compiler/ in the table
def test_a_cache_of_another_user(tmp_path: Path) -> None:
    """It is read and left as it is; one warning, though a program is missing in it."""
    before = as_nobody()
    _let_others_pass(tmp_path)
    cache, own = tmp_path / "cache", tmp_path / "own"
    own.mkdir()
    own.chmod(0o777)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment |= {"COMFY_TPU_PROGRAM_STORE": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(own)}
    command = (sys.executable, "-m", "comfy_tpu.cli", "generate", PROMPT, "--cache-dir", str(cache), "--json")

    def run(*more: str) -> tuple[list[bool], str]:
        done = subprocess.run([*more], cwd=own, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [program["from_cache"] for program in json.loads(done.stdout)["programs"]], done.stderr

    size = ("--steps", "1", "--num-frames")
    made, _ = run(*command, *size, "5", "-o", "a.gif")
    assert not any(made)
    if os.geteuid() != 0:
        for path in (cache, cache / "programs"):
            path.chmod(0o555)
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    found, error = run(*before, *command, *size, "5", "-o", "b.gif")
    assert found == [True] * len(made)
    assert error.count("programs that it lacks will be compiled again") == 1
    found, error = run(*before, *command, *size, "9", "-o", "c.gif")
    assert False in found
    assert error.count("cannot be written") == 1, error
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == files


# disks and clocks


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "VideoPipeline", FakePipeline)
    return tmp_path


def test_an_output_on_a_full_disk(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "x.gif").symlink_to("/dev/full")
    status = cli.main(["generate", PROMPT, "-o", "x.gif"])
    error = capsys.readouterr().err
    assert status == 1
    assert "Traceback" not in error
    assert "x.gif" in error or "/dev/full" in error
    assert [path.name for path in fake.iterdir()] == ["x.gif"]


class JumpingClock:
    """A wall clock that an administrator or NTP sets: days forward, then years back, at every look."""

    def __init__(self) -> None:
        self._jumps = itertools.cycle((0.0, 86400.0, -1e9, 3e9, -86400.0))
        self._now = time.time

    def __call__(self) -> float:
        return self._now() + next(self._jumps)


def test_a_clock_that_jumps_while_a_video_is_made(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", JumpingClock())
    assert cli.main(["generate", PROMPT, "-o", "x.gif", "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    assert all(0 <= value < 600 for value in seconds.values()), seconds
    assert media.read_metadata(fake / "x.gif")["prompt"] == PROMPT


def _job(number: int) -> NewJob:
    return NewJob(f"id{number}", number, Request({"prompt": PROMPT, "seed": number}), f"{number}.mp4")


def test_a_clock_that_jumps_takes_no_job_from_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver on this machine is alive as long as it holds its lock, whatever the time is."""
    first = Ledger(tmp_path / "ledger.sqlite")
    first.submit([_job(1)])
    (leased,) = first.lease(1)
    for jump in (10 * ledgers.LEASE_SECONDS, 1e9, -1e9):
        with monkeypatch.context() as patch:
            now = time.time() + jump
            patch.setattr(time, "time", lambda now=now: now)
            second = Ledger(tmp_path / "ledger.sqlite")
            second.renew()
            assert second.lease(1) == [], f"taken at {jump:+g} s"
            second.close()
            first.renew()
    assert first.counts() == Counts(leased=1)
    assert first.finish(leased.id, [], {"total": 1.0})
    first.close()


def test_a_clock_that_jumps_back_leaves_ids_of_a_server_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that lists its jobs goes on behind the last one that it has seen."""
    made = list[str]()
    with contextlib.closing(ServedLedger(tmp_path / "ledger.sqlite")) as ledger:
        monkeypatch.setattr(time, "time", JumpingClock())
        for number in range(10):
            made.append(ledger.new_id("video"))
            order = Order("ann", "video", None, str(number))
            ledger.accept(dataclasses.replace(_job(number), id=made[-1]), order, queue_limit=100)
    assert made == sorted(set(made))


def test_cache_files_from_the_future_are_removed_last(tmp_path: Path) -> None:
    """Their times were written before the clock was set back: nothing fails, and the limit holds."""
    for number, age in enumerate((1000.0, -1e8, 0.0)):
        path = tmp_path / f"jit_x{number}-{'0' * 64}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (time.time() - age, time.time() - age))
    assert trim_files(tmp_path, 250) == 200
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == ["jit_x1", "jit_x2"]


# processes and threads


def draw(directory: Path, seed: int = 1) -> np.ndarray:
    """One small video of the demo model in a pipeline of its own."""
    pipeline = video.VideoPipeline.open(directory)
    settings = pipeline.settings(num_inference_steps=1, num_frames=5, seed=seed)
    return torch.cat(
        list(pipeline.decode(pipeline.denoise(pipeline.encode(PROMPT, settings), settings), settings)), 1
    ).numpy()


def spawned(number: int) -> tuple[int, bytes]:
    return number, draw(DEMO_DIRECTORY, number).tobytes()


@pytest.mark.slow
def test_one_pipeline_per_thread() -> None:
    alone = {seed: draw(DEMO_DIRECTORY, seed) for seed in (1, 2)}
    together = threading.Barrier(2)

    def run(seed: int) -> np.ndarray:
        together.wait()
        return draw(DEMO_DIRECTORY, seed)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(alone, pool.map(run, alone), strict=True))
    for seed, frames in alone.items():
        assert (found[seed] == frames).all()


@pytest.mark.slow
def test_spawned_processes() -> None:
    """Nothing of the parent is needed: children import the package themselves, and draw what it draws."""
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, frames in pool.map(spawned, (1, 2)):
            assert frames == draw(DEMO_DIRECTORY, number).tobytes()


@pytest.mark.slow
def test_two_processes_share_output_cache_and_model(tmp_path: Path) -> None:
    """Both begin with an empty cache; both succeed, and the video is a whole one."""
    command = ("-m", "comfy_tpu.cli", "generate", PROMPT, "--steps", "1", "--num-frames", "5", "-o", "x.mp4")
    kept = {name: value for name, value in os.environ.items() if name != "COMFY_TPU_PROGRAM_STORE"}
    environment = {
        **kept,
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "XLA_FLAGS": "",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        status, out, error = finish(process)
        assert (status, out) == (0, "x.mp4\n"), error
        assert "damaged" not in error, error
    assert media.read_metadata(tmp_path / "x.mp4")["prompt"] == PROMPT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "x.mp4"]
