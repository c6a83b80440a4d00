"""The thread that carries jobs out, the writer of videos, and files that come to the driver."""

import contextlib
import itertools
import queue
import sys
import threading

import pytest
import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.driver import Batch
from comfy_tpu.jobs.execution import Executor
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Counts, Job, Ledger, NewJob, OutputFile
from comfy_tpu.jobs.outcome import CancelledError, Event, Outcome
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.worker_thread import WorkerThread
from comfy_tpu.jobs.writing import Row, Writer
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline


def make_job(number):
    return Job(f"id-{number}", Request({"prompt": f"job {number}"}), f"{number}.png", 1)


class SlowExecutor:
    """Runs a group until it is cancelled."""

    def __init__(self, on_outcome, on_progress):
        self._on_outcome, self._on_progress = on_outcome, on_progress
        self.is_running = threading.Event()
        self.current_jobs = ()

    def run(self, jobs):
        self.current_jobs = tuple(job.id for job in jobs)
        self.is_running.set()
        try:
            while True:
                self._on_progress(Progress("denoising", "", 1, 2))
        except CancelledError:
            for job in jobs:
                self._on_outcome(Outcome(job.id, "returned"))

    def close(self):
        pass


def test_cancelled_jobs_are_all_returned():
    executors = []

    def make(*callbacks):
        executors.append(SlowExecutor(*callbacks))
        return executors[0]

    worker = WorkerThread("worker", 2, make)
    worker.give([make_job(1), make_job(2)])
    worker.give([make_job(3)])
    assert worker.capacity(10) == 0
    assert executors[0].is_running.wait(10)
    worker.cancel()
    worker.close()
    outcomes = [item for item in worker.wait(0.0) if not isinstance(item, Event)]
    assert outcomes == [Outcome(f"id-{number}", "returned") for number in (1, 2, 3)]
    assert worker.capacity(10) == 0  # it takes no more


def test_one_job_is_cancelled_and_the_next_begins():
    executors = []

    def make(*callbacks):
        executors.append(SlowExecutor(*callbacks))
        return executors[0]

    worker = WorkerThread("worker", 1, make)
    worker.give([make_job(1)])
    worker.give([make_job(2), make_job(3)])
    assert executors[0].is_running.wait(10)
    worker.cancel_job("id-2")  # before it has begun
    worker.cancel_job("id-1")
    seen = []
    while Outcome("id-1", "returned") not in seen or executors[0].current_jobs != ("id-3",):
        seen += [item for item in worker.wait(10.0) if isinstance(item, Outcome)]
    assert seen == [Outcome("id-1", "returned"), Outcome("id-2", "returned")]
    while not any(isinstance(item, Event) and item.jobs == ("id-3",) for item in worker.wait(10.0)):
        pass
    worker.cancel()
    worker.close()


class QuickExecutor:
    def __init__(self):
        self.has_run = threading.Event()

    def run(self, jobs):
        self.has_run.set()

    def close(self):
        pass


def interrupt_at(line, before):
    """A trace function that raises KeyboardInterrupt at the n-th line that is run, after `before()`."""
    lines = itertools.count(1)

    def trace(frame, event, argument):
        if event == "line" and next(lines) == line:
            before()
            raise KeyboardInterrupt
        return trace

    return trace


def test_it_ends_wherever_ctrl_c_interrupts_a_new_group():
    for line in itertools.count(1):
        executor = QuickExecutor()
        worker = WorkerThread("worker", 1, lambda *callbacks, executor=executor: executor)
        # Where the group was handed over already, the thread waits for the next one before the interrupt.
        sys.settrace(interrupt_at(line, lambda executor=executor: executor.has_run.wait(0.05)))
        try:
            worker.give([make_job(1)])
        except KeyboardInterrupt:
            is_interrupted = True
        else:
            is_interrupted = False
        finally:
            sys.settrace(None)
        worker.cancel()
        closing = threading.Thread(target=worker.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), f"interrupted at line {line}"
        if not is_interrupted:
            break
    assert line > 3


class FullFolder(Folder):
    def place(self, directory, names):
        raise ComfyTpuError("output=x could not be written: No space left on device")


@pytest.mark.parametrize("decoder_fails", [False, True])
def test_a_file_that_cannot_be_placed_after_the_last_frame(decoder_fails, tmp_path, monkeypatch):
    """The writer does not wait for frames after the last one. An error of the decoder is reported by the decoder."""

    def take_all(paths, chunks, **options):
        if decoder_fails:
            raise ComfyTpuError("output=x could not be written: No space left on device")
        list(chunks)

    def decode():
        yield torch.zeros(1, 1)
        if decoder_fails:
            raise RuntimeError("decoder")

    monkeypatch.setattr(media, "write_videos", take_all)
    outcomes = queue.Queue()
    writer = Writer(FullFolder(str(tmp_path)), outcomes.put)
    row = Row(make_job(1), GenerationSettings(), ("1.png",), None, {})
    with pytest.raises(RuntimeError, match="decoder") if decoder_fails else contextlib.nullcontext():
        writer.write([row], decode(), started=0.0, seconds={})
    writer.close()
    found = [outcomes.get_nowait() for _ in range(outcomes.qsize())]
    assert [(outcome.state, outcome.stops_batch) for outcome in found] == (
        [] if decoder_fails else [("returned", True)]
    )


def test_a_model_that_cannot_be_opened_is_said_once(tmp_path):
    """Its jobs fail together, those that other workers have too, and those of another mesh go on."""
    folder, observer = Folder(str(tmp_path / "out")), Observer()
    folder.prepare()
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        meshes = ["sp=9"] * 4 + ["single"] * 2
        requests = [Request({"prompt": str(number), "mesh": mesh}) for number, mesh in enumerate(meshes)]
        ledger.submit([NewJob(request.prompt, 1, request, f"{request.prompt}.png") for request in requests])
        batch = Batch(folder, ledger, observer)
        bad, good = (ledger.lease(2, shape_key=requests[number].shape_key) for number in (0, -1))
        batch._given = {job.id: job for job in (*bad, *good)}
        batch._record(Outcome(good[0].id, "done"))
        for job in bad:
            batch._record(Outcome(job.id, "failed", error="mesh", is_final=True, is_of_model=True))
        assert observer.finishes == [("", "done"), ("mesh", "failed")]
        assert ledger.counts() == Counts(leased=1, done=1, failed=4)
        # A worker that lacks the devices of one that had them.
        batch._record(Outcome(good[1].id, "failed", error="mesh", is_final=True, is_of_model=True))
        assert observer.finishes[2:] == [("mesh", "failed")]
        assert observer.of_model == [False, True, False]
        assert ledger.counts() == Counts(done=1, failed=5)


class Observer:
    def __init__(self):
        self.finishes = []
        self.of_model = []

    def finished(self, outcome, state, counts):
        self.of_model.append(outcome.is_of_model)
        self.finishes.append((outcome.error, state))


@pytest.fixture
def leased(tmp_path):
    """A batch with one job that runs."""
    folder = Folder(str(tmp_path / "out"))
    folder.prepare()
    ledger = Ledger(folder.ledger_path)
    ledger.submit([NewJob("id-1", 1, Request({"prompt": "x"}), "a/1.png")])
    ledger.start([job.id for job in ledger.lease(1)], "worker-1")
    yield Batch(folder, ledger, Observer())
    ledger.close()


DONE = Outcome("id-1", "done", (OutputFile("a/1.png", "", 3),), (("a/1.png", b"abc"),))


def test_contents_are_put_at_their_places(leased):
    leased._record(DONE)
    assert (leased.folder.local / "a" / "1.png").read_bytes() == b"abc"
    assert leased._observer.finishes == [("", "done")]


def test_a_place_outside_by_a_link_fails_its_job_only(leased, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (leased.folder.local / "a").symlink_to(tmp_path / "elsewhere")
    leased._record(DONE)
    ((error, state),) = leased._observer.finishes
    assert "is outside the batch's directory, by a link" in error
    assert state == "failed"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_full_disk_stops_the_batch_and_returns_the_job(leased, monkeypatch):
    def receive(name, content):
        raise ComfyTpuError("output=x could not be written: No space left on device")

    monkeypatch.setattr(leased.folder, "receive", receive)
    with pytest.raises(ComfyTpuError, match="No space left on device; start the batch again afterwards"):
        leased._record(DONE)
    assert leased.ledger.counts().submitted == 1


@pytest.mark.slow
def test_groups_are_padded_to_the_smallest_compiled_number_of_rows(tmp_path, monkeypatch):
    """A single job after a group of five is not made five times, and two are not padded to five."""
    rows, outcomes = [], []
    denoise = VideoPipeline.denoise

    def count(self, embeddings, settings, *arguments, **options):
        rows.append(settings.num_videos)
        return denoise(self, embeddings, settings, *arguments, **options)

    monkeypatch.setattr(VideoPipeline, "denoise", count)
    executor = Executor(Folder(str(tmp_path)), batch_size=5, on_outcome=outcomes.append)
    shape = {"width": 16, "height": 16, "num_frames": 1, "num_inference_steps": 1}
    numbers = iter(range(100))
    with contextlib.closing(executor):
        for size in (1, 5, 1, 2, 4):
            names = [str(next(numbers)) for _ in range(size)]
            executor.run([Job(name, Request({"prompt": name, **shape}), f"{name}.png", 1) for name in names])
    assert rows == [1, 5, 1, 1, 1, 5]
    assert [outcome.state for outcome in outcomes] == ["done"] * 13
