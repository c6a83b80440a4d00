"""The fields of a second pass at a larger size: accepted, refused, counted and shown."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import model_cards
from comfy_tpu.jobs.outcome import Event
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.serving.admission import Admission, TooLargeError
from comfy_tpu.serving.estimates import Estimator
from comfy_tpu.serving.job_progress import JobProgress
from comfy_tpu.serving.planner import StepCost, _Counter
from comfy_tpu.serving.served_model import ServedModel, open_served_model
from tests.serving.stand_in import Served, running
from tests.serving.test_admission import SETTINGS, WAN, ByPixels
from tests.serving.test_api import create, wait_for

LARGER = dataclasses.replace(SETTINGS, width=1920, height=1072, num_inference_steps=20)


def test_an_order_has_the_size_of_its_result_and_the_settings_of_its_first_pass(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        chosen = {"upscale": 2, "upscale_strength": 0.4, "upscale_steps": 10, "upscale_by": "pixels"}
        made = create(client, size="64x64", **chosen)
        assert made["size"] == "128x128"
        assert made["second_pass"] == {"scale": 2, "strength": 0.4, "steps": 10, "by": "pixels"}
        assert (made["settings"]["width"], made["settings"]["height"]) == (64, 64)
        record = service.ledger.find(made["id"])
        assert record is not None
        assert {name: record.request.values[name] for name in chosen} == chosen
        form = client.post("/v1/videos", data={"prompt": "a cat", "upscale": "1.5"}, files={"x": b""})
        assert form.status_code == 400, "a file of no field"
        form = client.post("/v1/videos", data={"prompt": "a cat", "upscale": "1.5"})
        assert (form.json()["size"], form.json()["second_pass"]["strength"]) == ("96x96", 0.5)
        assert create(client)["second_pass"] is None
        (model,) = client.get("/v1/models").json()["data"]
        assert model["has_second_pass"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"upscale": 1}, "upscale", "upscale=1 is not a number over 1"),
        ({"upscale": "nan"}, "upscale", "is no number"),
        ({"upscale": [2]}, "upscale", "is no number"),
        ({"upscale": 1.01}, "upscale", "is 64×64 again"),
        ({"upscale": 8, "size": "720P"}, "upscale", "10240"),
        ({"upscale": 2, "upscale_strength": 0}, "upscale_strength", "upscale_strength=0 is not a number over 0"),
        ({"upscale": 2, "upscale_strength": True}, "upscale_strength", "is no number"),
        ({"upscale": 2, "upscale_steps": 2.5}, "upscale_steps", "upscale_steps=2.5 is not allowed"),
        ({"upscale": 2, "upscale_by": "x" * 1000}, "upscale_by", "is unknown; choose from latent"),
        ({"upscale": 2, "tile": "63x64"}, "tile", "has a side of 63"),
        ({"tile": 64}, "tile", "tile='64' is no size of tiles; write width×height"),
        ({"tile": ["64x64"]}, "tile", "is no size of tiles"),
        ({"upscale_steps": 4}, "upscale_steps", "give upscale too"),
    ],
)
def test_bad_values_are_refused_at_once(fields: dict[str, Any], param: str, reason: str, shared: Served) -> None:
    client, service = shared
    answer = client.post("/v1/videos", json={"prompt": "a cat", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert reason in answer.json()["error"]["message"]
    assert len(answer.text) < 600
    assert service.ledger.counts().total == 0


def test_the_passes_have_the_steps_that_they_run() -> None:
    model = open_served_model("demo")
    first, larger = model.passes(
        {"width": 64, "height": 64, "upscale": 2, "upscale_strength": 0.4, "num_inference_steps": 20}
    )
    assert (first.width, first.num_inference_steps) == (64, 20)
    assert (larger.width, larger.num_inference_steps) == (128, 8)
    assert model.passes({}) == (model.defaults,)


def test_tiles_that_the_model_cannot_cut_are_refused_with_the_order() -> None:
    large = {"width": 1024, "height": 1024, "tile": "512x512"}
    picture = GivenMedia((Image.new("RGB", (64, 64)),))
    cases: list[tuple[str, dict[str, Any], GivenMedia]] = [
        ("LTX-2", large, NO_MEDIA),
        ("LTX-2", {"width": 512, "height": 512, "tile": "512x512", "upscale": 2}, NO_MEDIA),
        ("Wan 2.2 5B", large, picture),
        ("Wan 2.2 5B", {"width": 512, "height": 512, "tile": "512x512", "upscale": 2}, picture),
        ("Wan 2.1 VACE", large, GivenMedia(references=picture.images)),
        ("Flux.2 dev", large, picture),
    ]
    for name, values, given in cases:
        (card,) = (card for card in model_cards() if card.name == name)
        with pytest.raises(InvalidValueError, match="^tile=512x512 ") as caught:
            ServedModel(name, card, card.defaults).passes(values, given)
        assert caught.value.field == "tile"


def test_tiles_are_another_cost() -> None:
    counted: list[GenerationSettings] = []

    def count(model: str, settings: GenerationSettings) -> StepCost:
        counted.append(settings)
        return StepCost(1.0)

    counter = _Counter(count)
    for change in ({}, {"tile": "512x512"}, {"tile": "512x512", "tile_overlap": 0.5}, {}):
        counter.cost("wan", dataclasses.replace(SETTINGS, **change))
    assert len(counted) == 3


def test_both_passes_take_time_and_have_to_fit() -> None:
    planner = ByPixels(1920 * 1072 * 81, knows_seconds=True)
    seconds = Admission(planner, Estimator(planner)).admit("wan", WAN, (SETTINGS, LARGER))
    assert seconds == pytest.approx((50 * 1280 * 720 * 81 + 20 * 1920 * 1072 * 81) / 1e6)
    with pytest.raises(
        TooLargeError,
        match="50 steps of 1280x720 with 81 frames and 20 steps of 1920x1072 with 81 frames would take about",
    ):
        Admission(planner, Estimator(planner), 4000.0).admit("wan", WAN, (SETTINGS, LARGER))
    small = ByPixels(1280 * 720 * 81)
    with pytest.raises(
        TooLargeError, match=r"upscale makes it 1920x1072 .* GB can be used; choose a smaller factor"
    ) as e:
        Admission(small, Estimator(small)).admit("wan", WAN, (SETTINGS, LARGER))
    assert e.value.field == "upscale"
    estimator = Estimator(ByPixels())
    estimator.record("wan", (SETTINGS, LARGER), 90.0)
    assert estimator.predict("wan", (SETTINGS, LARGER)) == 90.0
    share = 50 * 1280 * 720 / (50 * 1280 * 720 + 20 * 1920 * 1072)
    assert estimator.predict("wan", (SETTINGS,)) == pytest.approx(90.0 * share)


def _follow(progress: JobProgress, *events: tuple[str, int, int]) -> list[int]:
    percents = []
    for stage, done, total in events:
        progress = progress.follow(Event("worker", stage, "", done, total))
        percents.append(progress.percent)
    return percents


def test_progress_goes_up_over_both_passes() -> None:
    first = (("loading", 1, 9), ("denoising", 0, 4), ("denoising", 2, 4), ("denoising", 4, 4), ("decoding", 1, 3))
    assert _follow(JobProgress(), *first) == [0, 0, 50, 100, 100]
    second = (("compiling", 0, 1), ("denoising", 0, 12), ("denoising", 6, 12), ("denoising", 12, 12))
    both = [0, 0, 12, 25, 25, 25, 25, 62, 100, 100]
    assert _follow(JobProgress(steps=(4, 12)), *first, *second, ("decoding", 3, 3)) == both
    second = (("denoising", 0, 4), ("denoising", 2, 4), ("denoising", 4, 4))
    assert _follow(JobProgress(steps=(4, 4)), *first, *second) == [0, 0, 25, 50, 50, 50, 75, 100]


def test_progress_where_events_are_missing_or_a_job_begins_again() -> None:
    again = (("denoising", 3, 4), ("loading", 0, 9), ("denoising", 1, 4))
    assert _follow(JobProgress(), *again) == [75, 75, 25]
    assert _follow(JobProgress(steps=(4, 16)), ("denoising", 1, 4), ("denoising", 2, 16)) == [5, 30]
    again = (("denoising", 3, 4), ("denoising", 0, 4), ("denoising", 4, 4), ("denoising", 0, 16), ("decoding", 1, 2))
    assert _follow(JobProgress(steps=(4, 16)), *again) == [15, 0, 20, 20, 20]
    assert _follow(JobProgress(steps=(20, 8)), ("denoising", 8, 16), ("denoising", 8, 8)) == [35, 100]


def test_a_job_is_followed_over_its_passes(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, executor):
        made = create(client, "wait", upscale=2)
        wait_for(client, made["id"], "in_progress")
        while (video := client.get(f"/v1/videos/{made['id']}").json())["stage"] != "denoising":
            assert video["status"] == "in_progress"
        assert video["progress"] == 16, "a step of four in the first pass, which has 20 of 30"
        executor.may_go_on.set()
        wait_for(client, made["id"], "completed")
