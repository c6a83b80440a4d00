"""Jobs of a batch that are ended in the middle of their steps, and go on from what was saved."""

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from comfy_tpu.cli.main import main
from comfy_tpu.errors import InvalidValueError, NotFiniteError
from comfy_tpu.jobs.driver import Batch
from comfy_tpu.jobs.execution import Executor
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job, Ledger
from comfy_tpu.jobs.outcome import CancelledError, Outcome
from comfy_tpu.jobs.output_names import find_steps_job, list_steps_names, steps_name
from comfy_tpu.jobs.ray_workers import RayConfig, RayWorkers
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.saved_steps import SavedSteps
from comfy_tpu.jobs.sources import Line
from comfy_tpu.pipeline.progress import Progress
from tests.jobs.stand_in import StandInWorkers, find_model
from tests.jobs.test_batch import batch, jobs
from tests.jobs.test_driver import Observer, parse
from tests.pipeline import small_pipeline

VALUES: dict[str, Any] = {
    "model": str(small_pipeline.directory()),
    "mesh": "single",
    "prompt": "a red circle",
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 4,
}


class Killed(BaseException):
    """As a kill: nothing in an executor handles it."""


class Bench:
    """An executor that is ended as it reports a step, and what it does."""

    def __init__(self, folder: Folder, every: int) -> None:
        self.outcomes: list[Outcome] = []
        self.steps: list[int] = []
        self._is_closed = False
        self.ends: dict[int, BaseException] = {}
        """What a report of a step of this number raises, before it is saved."""
        self.executor = Executor(
            folder,
            batch_size=None,
            on_outcome=self.outcomes.append,
            on_progress=self._report,
            saved_steps=SavedSteps(folder, every),
        )

    def _report(self, progress: Progress) -> None:
        if progress.stage == "denoising" and progress.preview is not None:
            self.steps.append(progress.done)
            if progress.done in self.ends:
                raise self.ends.pop(progress.done)

    def close(self) -> None:
        """Waits until all files are written."""
        if not self._is_closed:
            self._is_closed = True
            self.executor.close()

    def run(self, *jobs: Job) -> list[int]:
        """The numbers of the steps that were computed."""
        self.steps.clear()
        self.executor.run(jobs)
        return list(self.steps)


@pytest.fixture
def bench(tmp_path: Path, address: str) -> Iterator[Bench]:
    folder = Folder(address)
    folder.prepare()
    bench = Bench(folder, 2)
    yield bench
    bench.close()


def job(id_: str, **changed: Any) -> Job:
    return Job(id_, Request(VALUES | changed), f"{id_}.npy", 1)


def exists(address: str, name: str) -> bool:
    return bool(fsspec.core.url_to_fs(address)[0].exists(f"{address}/{name}"))


def load(address: str, name: str) -> np.ndarray:
    with fsspec.open(f"{address}/{name}") as file:
        return np.load(file)


@pytest.mark.thorough  # by default: tests/pipeline/test_step_checkpoint.py
@pytest.mark.parametrize("address", ["memory"], indirect=True)
def test_ended_jobs_go_on(bench: Bench, address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is killed goes on from the last save, one that is cancelled, as on SIGTERM, from its last step, and one
    whose latents were no numbers from the beginning."""
    assert bench.run(job("whole")) == [1, 2, 3, 4]
    bench.ends[4] = Killed()
    with pytest.raises(Killed):
        bench.run(job("killed"))
    assert exists(address, steps_name("killed"))
    assert bench.run(job("killed")) == [3, 4]
    bench.ends[3] = CancelledError()
    bench.run(job("cancelled"), job("next", seed=1))
    assert [outcome.state for outcome in bench.outcomes[-2:]] == ["returned", "returned"]
    assert bench.run(job("cancelled")) == [4]
    assert bench.executor._saved_steps is not None
    bench.executor._saved_steps.close()
    bench.executor._saved_steps = SavedSteps(Folder(str(tmp_path)), 2)  # a local directory
    bench.ends[4] = NotFiniteError("denoising made NaN")
    assert bench.run(job("broken")) == [1, 2, 3, 4]
    assert bench.outcomes[-1].state == "failed"
    bench.ends[3] = Killed()
    with pytest.raises(Killed):
        bench.run(job("broken"))
    assert (tmp_path / steps_name("broken")).exists()
    assert bench.run(job("broken")) == [3, 4]
    bench.close()
    done = {outcome.id: outcome.resumed_after for outcome in bench.outcomes if outcome.state == "done"}
    assert done == {"whole": 0, "killed": 2, "cancelled": 3, "broken": 2}
    for name in ("killed.npy", "cancelled.npy", "broken.npy"):
        assert np.array_equal(load(address, name), load(address, "whole.npy")), name
    assert not caplog.messages


def test_names() -> None:
    assert find_steps_job(steps_name("ab")) == find_steps_job(steps_name("ab", "second-pass")) == "ab"
    assert find_steps_job("ab.safetensors") is None
    assert list_steps_names("ab", {}) == [steps_name("ab")]
    assert list_steps_names("ab", {"upscale": 2}) == [steps_name("ab"), steps_name("ab", "second-pass")]


@pytest.mark.parametrize("address", ["local", "memory"], indirect=True)
def test_saved_steps_go_when_the_job_is_done_or_not_wanted(address: str) -> None:
    """A remote directory may have those of another machine's jobs, which stay."""
    folder, system = Folder(address), fsspec.core.url_to_fs(address)[0]
    folder.prepare()

    def start(prompts: str, *, saves_steps: bool = False, runs: bool = True) -> dict[str, str]:
        ledger = Ledger(folder.ledger_path)
        try:
            made = Batch(folder, ledger, Observer(), saves_steps=saves_steps)
            made.submit([Line(number, {"prompt": each}) for number, each in enumerate(prompts, 1)], parse, find_model)
            if runs:
                made.run(StandInWorkers(folder))
            return {each["request"]["prompt"]: each["id"] for each in ledger.results()}
        finally:
            ledger.close()

    ids = start("ab", runs=False)
    system.makedirs(f"{address}/.comfy-tpu/steps", exist_ok=True)
    for id_ in (*ids.values(), "other"):
        system.pipe_file(f"{address}/{steps_name(id_)}", b"steps")
    start("a", runs=False)
    left = [id_ for id_ in (*ids.values(), "other") if exists(address, steps_name(id_))]
    assert left == ([ids["a"]] if folder.local else [ids["a"], "other"])
    start("a")
    assert not exists(address, steps_name(ids["a"]))
    (id_,) = (each for prompt, each in start("c", runs=False).items() if prompt == "c")
    system.pipe_file(f"{address}/{steps_name(id_)}", b"steps")
    start("c", saves_steps=True)
    assert not exists(address, steps_name(id_))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--checkpoint-every", "0"), "--checkpoint-every 0 is not a number of steps; give a whole number from 1"),
        (
            ("--checkpoint-every", "5", "--batch-size", "4"),
            "--checkpoint-every 5 saves the steps of one job at a time, and batch_size=4 has jobs share theirs; leave",
        ),
    ],
)
def test_bad_flags(flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", str(jobs(tmp_path / "jobs.txt", "a cat")), "-o", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_cluster_needs_a_place_that_all_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfy_tpu.jobs.ray_workers.import_ray", lambda: None)
    config = dataclasses.replace(RayConfig(), address="auto")
    with pytest.raises(InvalidValueError, match="checkpoint_every=5 needs an output that all machines of a cluster"):
        RayWorkers(Folder(str(tmp_path)), config, batch_size=1, report=print, checkpoint_every=5)


COMMAND = """
import os, sys
from comfy_tpu.cli.main import main
from comfy_tpu.jobs.worker_thread import WorkerThread
step, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
report = WorkerThread._on_progress
def report_and_kill(thread, progress):
    if progress.stage == "denoising" and progress.preview is not None and progress.done == step:
        os.kill(os.getpid(), number)
        while not thread._is_cancelled.wait(1.0):
            pass
    report(thread, progress)
WorkerThread._on_progress = report_and_kill
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "resumed_after"), [(signal.SIGKILL, 4), (signal.SIGTERM, 5)])
def test_a_batch_whose_process_ends_goes_on(number: signal.Signals, resumed_after: int, tmp_path: Path) -> None:
    """Of two jobs, the first of which is killed as it reports the fifth of six steps."""
    lines = [{"prompt": "a red circle", "seed": seed, "output": f"{seed}.npy"} for seed in range(2)]
    file = jobs(tmp_path / "jobs.jsonl", *lines)
    assert batch(file, tmp_path / "whole", "--batch-size", "1", "--steps", "6") == 0
    flags = ("--mesh", "single", "--height", "32", "--width", "32", "--num-frames", "5", "--steps", "6", "--json")
    arguments = ("batch", str(file), "-o", str(tmp_path / "out"), "--model", str(small_pipeline.directory()), *flags)
    command = [sys.executable, "-c", COMMAND, "5", str(int(number)), *arguments, "--checkpoint-every", "2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == (-number if number == signal.SIGKILL else 128 + number), ended.stderr
    (saved,) = (tmp_path / "out" / ".comfy-tpu" / "steps").iterdir()
    command[3] = "99"
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert {each["line"]: each["resumed_after"] for each in events if each["event"] == "done"} == {
        1: resumed_after,
        2: 0,
    }
    for seed in range(2):
        made = (tmp_path / "out" / f"{seed}.npy").read_bytes()
        assert made == (tmp_path / "whole" / f"{seed}.npy").read_bytes()
    assert not saved.exists()
