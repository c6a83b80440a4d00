"""Previews of jobs: when they are made, and of which row of the latents."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageStat

from comfy_tpu.jobs import preview_rate
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.local_worker import LocalWorker
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline.preview_colours import LearnedColours
from tests.families import small_flux


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(preview_rate, "time", clock)
    return clock


def test_only_watched_jobs_have_previews(clock: Clock) -> None:
    rate = PreviewRate()
    assert rate.take_due(["a", "b"]) == set()
    with rate.watching("a"), rate.watching("a"):
        assert rate.take_due(["a", "b"]) == {"a"}
        assert rate.take_due(["a"]) == set()
    clock.now += 10
    assert rate.take_due(["a"]) == set()


def test_previews_are_seldom(clock: Clock) -> None:
    rate = PreviewRate(seconds=1.0, share=0.1)
    with rate.watching("a"), rate.watching("b"):
        assert rate.take_due(["a"]) == {"a"}
        assert rate.take_due(["b"]) == {"b"}  # steps beside those of the other
        clock.now += 1.0
        assert rate.take_due(["a", "b"]) == {"a", "b"}
        rate.spent(0.5)
        clock.now += 4.9
        assert rate.take_due(["a", "b"]) == set()
        clock.now += 0.2
        assert rate.take_due(["a", "b"]) == {"a", "b"}


def run_jobs(
    directory: Path, prompts: list[str], watched: list[int], *, batch_size: int, suffix: str = ".mp4", **common: object
) -> list[Event]:
    """The events with previews."""
    folder, rate = Folder(str(directory)), PreviewRate(seconds=0.0, share=1e9)
    folder.prepare()
    jobs = [
        Job(f"job{number}", Request({**common, "prompt": prompt, "seed": number}), f"{number}{suffix}", 1)
        for number, prompt in enumerate(prompts)
    ]
    happened: list[Event | Outcome] = []
    worker = LocalWorker(folder, batch_size=batch_size, previews=rate)
    try:
        with contextlib.ExitStack() as stack:
            for number in watched:
                stack.enter_context(rate.watching(jobs[number].id))
            worker.give(jobs)
            while sum(isinstance(each, Outcome) for each in happened) < len(jobs):
                happened += worker.wait(0.5)
    finally:
        worker.close()
    assert all(each.state == "done" for each in happened if isinstance(each, Outcome)), happened
    return [each for each in happened if isinstance(each, Event) and each.previews]


def brightness(jpeg: bytes) -> float:
    with Image.open(io.BytesIO(jpeg)) as image:
        assert (image.format, image.size) == ("JPEG", (8, 8))
        return float(ImageStat.Stat(image.convert("L")).mean[0])


@pytest.mark.slow
def test_jobs_that_share_steps_have_their_own_previews(tmp_path: Path) -> None:
    dark, bright = "a blue square moving right on a black background", "a red circle moving left on a white background"
    events = run_jobs(tmp_path, [dark, bright, dark], [0, 1], batch_size=3, model="demo", num_inference_steps=6)
    assert len(events) == 6
    assert events[-1].jobs == ("job0", "job1", "job2")
    first, second, unwatched = events[-1].previews
    assert unwatched == b""
    assert brightness(first) < 90
    assert brightness(second) > 150
    assert max(len(preview) for event in events for preview in event.previews) < 2000


SMALL = {"num_inference_steps": 2, "height": 32, "width": 32, "num_frames": 5}


@pytest.mark.thorough  # by default: that somebody does
def test_nobody_watches(tmp_path: Path) -> None:
    assert run_jobs(tmp_path, ["a red circle"], [], batch_size=1, model="demo", **SMALL) == []


@pytest.mark.slow
def test_a_model_without_colours_learns_them_from_its_first_result(tmp_path: Path) -> None:
    model = str(small_flux.directory("dev"))
    size = {"width": 64, "height": 64, "num_inference_steps": 2}
    events = run_jobs(tmp_path, ["a cat", "a dog"], [0, 1], batch_size=1, suffix=".png", model=model, **size)
    assert [event.jobs for event in events] == [("job1",)] * 2
    brightness(events[-1].previews[0])


def test_colours_are_learned_from_videos() -> None:
    """Latents whose first three channels are the colours, in another scale."""
    learned = LearnedColours()
    assert learned.colours is None
    for _ in range(4):
        assert learned.is_learning
        latents = torch.rand(2, 5, 3, 24, 32)
        colours = latents[:, :3].movedim(1, -1) * 0.5 + 0.25
        repeated = torch.cat([colours[:, :1], colours[:, 1:].repeat_interleave(4, dim=1)], dim=1)
        frames = repeated.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
        parts = list(learned.watch(latents, iter(frames.split(3, dim=1))))
        assert torch.equal(torch.cat(parts, dim=1), frames)
    assert not learned.is_learning
    assert learned.colours is not None
    for frame in range(3):
        shown = learned.colours.apply(latents[0, :, frame].movedim(0, -1), frame)
        torch.testing.assert_close(shown, colours[0, frame], atol=0.02, rtol=0)


def test_frames_that_latents_do_not_divide_teach_nothing() -> None:
    learned = LearnedColours()
    latents, frames = torch.rand(1, 5, 3, 4, 6), torch.rand(1, 4, 8, 12, 3)
    assert len(list(learned.watch(latents, iter([frames])))) == 1
    assert learned.colours is None
