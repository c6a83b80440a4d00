"""What is refused because it does not fit or would take too long, and how long accepted jobs take and wait."""

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.config import GenerationSettings
from comfy_tpu.jobs.worker_thread import ROWS_MAX
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.serving import scheduler
from comfy_tpu.serving.admission import Admission, TooLargeError
from comfy_tpu.serving.config import Limits
from comfy_tpu.serving.estimates import Estimator
from comfy_tpu.serving.planner import DevicePlanner, SlicePlanner, StepCost, _Counter, count_rows
from tests.serving.stand_in import running
from tests.serving.test_api import KEYS, create, wait_for

WAN = ModelFiles.open("demo").family.card
SETTINGS = GenerationSettings(width=1280, height=720, num_frames=81, num_inference_steps=50)


class ByPixels:
    """A device with room for so many pixels, which takes a second for a million."""

    def __init__(self, room: int = 10**12, *, knows_seconds: bool = False) -> None:
        self._room, self._knows_seconds = room, knows_seconds

    def cost(self, model: str, settings: GenerationSettings) -> StepCost | None:
        pixels = settings.width * settings.height * settings.num_frames * settings.num_videos
        seconds = pixels / 1e6 if self._knows_seconds else None
        return StepCost(float(pixels), needed_bytes=pixels, available_bytes=self._room, seconds=seconds)


def admit(planner: Any, settings: GenerationSettings = SETTINGS, job_seconds: float | None = None) -> float | None:
    return Admission(planner, Estimator(planner), job_seconds).admit("wan", WAN, (settings,))


@pytest.mark.parametrize(
    ("room", "change", "advice"),
    [
        (1280 * 720 * 41, {}, "1280x720 with 41 frames would fit"),
        (1280 * 720 * 81, {"num_videos": 2}, "1280x720 with 81 frames would fit"),
        (900 * 500 * 5, {}, r"\d+x480 with 5 frames would fit"),
        (1, {}, "choose a smaller size or fewer frames"),
    ],
)
def test_what_does_not_fit(room: int, change: dict[str, int], advice: str) -> None:
    with pytest.raises(TooLargeError, match=advice) as refused:
        admit(ByPixels(room), dataclasses.replace(SETTINGS, **change))
    assert refused.value.field == "size"
    assert "GB on each device" in str(refused.value)


def test_what_would_take_too_long() -> None:
    planner = ByPixels(knows_seconds=True)
    taken = admit(planner)
    assert taken == pytest.approx(50 * 1280 * 720 * 81 / 1e6)
    with pytest.raises(
        TooLargeError, match="50 steps of 1280x720 with 81 frames .* 1000 s are the most here; 13 steps"
    ):
        admit(planner, job_seconds=1000)
    assert admit(planner, job_seconds=10_000) == taken


def test_nothing_is_known() -> None:
    assert admit(None, job_seconds=1) is None
    assert admit(ByPixels(), job_seconds=1) is None


def test_times_are_those_of_the_same_shape_or_in_proportion_to_the_work() -> None:
    estimator = Estimator(ByPixels())
    estimator.record("wan", (SETTINGS,), 100.0)
    assert estimator.predict("wan", (dataclasses.replace(SETTINGS, seed=9, negative_prompt="dull"),)) == 100.0
    assert estimator.predict("wan", (dataclasses.replace(SETTINGS, num_inference_steps=25),)) == pytest.approx(50.0)
    assert estimator.predict("wan", (dataclasses.replace(SETTINGS, num_frames=41),)) == pytest.approx(100.0 * 41 / 81)
    assert estimator.predict("flux", (SETTINGS,)) is None
    estimator.record("wan", (SETTINGS,), 200.0)
    assert estimator.predict("wan", (SETTINGS,)) == pytest.approx(130.0)


def test_a_planner_of_slices_counts_the_model() -> None:
    files = ModelFiles.open("demo")
    small, large = (
        SlicePlanner(parse_slice("v6e-1"), lambda name: files).cost("demo", dataclasses.replace(files.defaults, **size))
        for size in ({}, {"num_frames": 2 * files.defaults.num_frames - 1})
    )
    assert small is not None
    assert large is not None
    assert 1.5 < large.flops / small.flops < 4
    assert small.seconds is not None
    assert 0 < small.needed_bytes < small.available_bytes


def test_a_planner_of_this_machine() -> None:
    """A CPU's memory is not counted, and `plan` does not know its speed."""
    cost = DevicePlanner({"platform": "cpu"}).cost("demo", ModelFiles.open("demo").defaults)
    assert cost is not None
    assert cost.flops > 0
    assert (cost.needed_bytes, cost.seconds) == (0, None)


def test_a_refusal_and_estimates_in_answers(tmp_path: Path) -> None:
    limits = Limits(job_seconds=2.5)
    with running(tmp_path, planner=ByPixels(64 * 64 * 20), limits=limits) as (client, _, executor):
        answer = client.post("/v1/videos", json={"prompt": "a cat", "num_frames": 81})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "does_not_fit")
        assert "would fit" in answer.json()["error"]["message"]
        first = create(client)
        assert (first["estimated_seconds"], first["estimated_wait_seconds"]) == (None, None)
        wait_for(client, first["id"], "completed")  # says that it took a second
        running_job = create(client, "wait")
        wait_for(client, running_job["id"], "in_progress")
        waiting = [create(client) for _ in range(3)]
        assert waiting[-1]["estimated_seconds"] == 1.0
        assert 1.5 <= waiting[-1]["estimated_wait_seconds"] <= 3.0
        long = client.post("/v1/videos", json={"prompt": "a cat", "steps": 200})
        assert "would take about 10 s, and 2 s are the most here; 50 steps" in long.json()["error"]["message"]
        executor.may_go_on.set()


class ByRows(ByPixels):
    def cost(self, model: str, settings: GenerationSettings) -> StepCost | None:
        return dataclasses.replace(super().cost(model, settings) or StepCost(1.0), rows=2)


def test_nobody_waits_for_more_than_what_shares_steps(tmp_path: Path) -> None:
    """Of one client's twenty jobs sixteen were given to the worker before another's first, whatever fits."""
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in KEYS.items()}
    with running(tmp_path, planner=ByRows(), group_size=ROWS_MAX, keys=KEYS) as (client, service, executor):
        made = [
            client.post("/v1/videos", json={"prompt": "wait"}, headers=headers["ann"]).json()["id"] for _ in range(20)
        ]
        wait_for(client, made[0], "in_progress", headers=headers["ann"])
        other = client.post("/v1/videos", json={"prompt": "of bob"}, headers=headers["bob"]).json()["id"]
        assert service.ledger.position(other) == 0
        executor.may_go_on.set()
        wait_for(client, other, "completed", headers=headers["bob"])
        prompts = [request.prompt for request in executor.requests]
    assert prompts.index("of bob") <= 1 + 2 * 2 + 1  # the warm-up, two groups, and one that came with it


@pytest.mark.parametrize(("seconds", "changes"), [(1000.0, 1), (0.0, 5)])
def test_models_in_turn_are_not_loaded_for_every_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, changes: int
) -> None:
    monkeypatch.setattr(scheduler, "_MODEL_SECONDS", seconds)
    with running(tmp_path) as (client, service, executor):
        service.models["other"] = dataclasses.replace(service.models["demo"], name="other")  # type: ignore[index]
        wait_for(client, create(client, "wait")["id"], "in_progress")
        made = [create(client, model=model)["id"] for _ in range(3) for model in ("demo", "other")]
        executor.may_go_on.set()
        for each in made:
            wait_for(client, each, "completed")
        models = [request.model for request in executor.requests]
    assert sum(one != next_one for one, next_one in itertools.pairwise(models)) == changes


@pytest.mark.parametrize(("chips", "width", "rows"), [(1, 64, 8), (1, 1280, 1), (8, 1280, 4)])
def test_jobs_that_share_a_step_elsewhere(chips: int, width: int, rows: int) -> None:
    settings = dataclasses.replace(SETTINGS, width=width, height=width, num_frames=5)
    assert count_rows(ModelFiles.open("demo"), settings, chips) == rows


def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(queued_jobs=1)) as (client, service, executor):
        service.estimator.record("demo", (service.models["demo"].defaults,), 42.0)
        accepted = 0
        while accepted < 3:  # one runs and one is leased ahead, as soon as the scheduler looks; one waits
            accepted += client.post("/v1/videos", json={"prompt": "wait"}).status_code == 200
        refused = client.post("/v1/videos", json={"prompt": "wait"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "42"
        executor.may_go_on.set()


def test_times_outlive_the_server(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        wait_for(client, create(client)["id"], "completed")
    with running(tmp_path) as (client, _, _):
        assert create(client)["estimated_seconds"] == 1.0


def test_a_known_shape_does_not_wait_for_the_count_of_another() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def count(model: str, settings: GenerationSettings) -> StepCost:
        if settings.num_frames == 81:
            begun.set()
            assert may_end.wait(60)
        return StepCost(float(settings.num_frames))

    counter = _Counter(count)
    small = dataclasses.replace(SETTINGS, num_frames=5)
    assert counter.cost("wan", small) == StepCost(5.0)
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(counter.cost, "wan", SETTINGS)
        assert begun.wait(60)
        assert counter.cost("wan", small) == StepCost(5.0)  # would wait for ever
        may_end.set()
        assert large.result(60) == StepCost(81.0)
