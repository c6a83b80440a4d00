"""Groups that run beside each other: each with a writer of its own, none before a lane is free."""

import threading

import pytest

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.jobs.batch_size import runs_beside
from comfy_tpu.jobs.lanes import Lanes
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline import small_pipeline

SECONDS = 30


class StandInWriter:
    is_closed = False

    def close(self):
        self.is_closed = True


@pytest.fixture
def lanes():
    made = Lanes(StandInWriter)
    yield made
    made.close()


def test_two_run_at_once_each_with_a_writer_of_its_own(lanes):
    together, writers = threading.Barrier(2), set()

    def action(writer):
        writers.add(writer)
        together.wait(SECONDS)

    for _ in range(4):
        lanes.run_beside(action)
    lanes.wait()
    assert len(writers) == 2


def test_one_that_runs_alone_waits_for_the_others(lanes):
    ended, go_on = [], threading.Event()

    def action(writer):
        go_on.wait(SECONDS)
        ended.append("beside")

    lanes.run_beside(action)
    threading.Timer(0.1, go_on.set).start()
    lanes.run_alone(lambda writer: ended.append("alone"))
    assert ended == ["beside", "alone"]


def test_those_that_run_alone_share_a_writer(lanes):
    """It holds them up where it is behind: frames that wait for it are in memory."""
    writers = set()
    for _ in range(3):
        lanes.run_alone(writers.add)
    assert len(writers) == 1


def test_an_error_is_raised_in_the_thread_that_gives_out_groups(lanes):
    def action(writer):
        raise RuntimeError("lost")

    lanes.run_beside(action)
    with pytest.raises(RuntimeError, match="lost"):
        lanes.wait()
    lanes.run_alone(lambda writer: None)  # the lane is free again


def test_closing_waits_and_closes_the_writers():
    lanes, writers, go_on = Lanes(StandInWriter), [], threading.Event()

    def action(writer):
        go_on.wait(SECONDS)
        writers.append(writer)

    lanes.run_beside(action)
    threading.Timer(0.1, go_on.set).start()
    lanes.close()
    assert [writer.is_closed for writer in writers] == [True]


@pytest.mark.parametrize(
    ("mesh", "height", "expected"),
    [
        ("single", 32, True),
        ("dp=2,sp=4", 32, False),  # collectives of two programs at once would wait for each other
        ("single", 2048, False),  # one of them keeps all cores busy, and has the memory
    ],
)
def test_small_groups_of_one_cpu_device_run_beside_each_other(mesh, height, expected, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh=mesh))
    settings = pipeline.settings(height=height, width=height, num_frames=5)
    assert runs_beside(pipeline, settings) is expected
