"""A preset without guidance, planned for a slice: one branch, and all devices on it."""

from __future__ import annotations

import pytest

from comfy_tpu.cli.main import main
from comfy_tpu.config import MeshSizes
from comfy_tpu.families.settings import make_settings
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning import plan
from comfy_tpu.planning.models import find_model


def test_four_steps_of_wan_14b_take_the_sequence_over_all_chips():
    model = find_model("Wan-AI/Wan2.1-T2V-14B-Diffusers")
    slice_ = parse_slice("v6e-8")
    chosen = model.presets["4step"].settings
    settings = make_settings(model.defaults, chosen, model.family.card.limits)
    assert rank_layouts(model.workload(model.defaults), slice_)[0].sizes == MeshSizes(dp=2, sp=4)
    assert rank_layouts(model.workload(settings), slice_)[0].sizes == MeshSizes(sp=8)


@pytest.mark.slow
def test_the_plan_says_so(capsys):
    assert main(["plan", "demo", "--tpu", "v6e-8", "--preset", "4step", "--no-compile"]) == 0
    text = capsys.readouterr().out
    assert "tokens × 1, one step" in text
    described = "preset 4step: 4 steps, guidance_scale 1, scheduler euler-trailing, flow_shift 3"
    assert f"{described}; one branch, so all devices work on it" in text


class PlannedError(Exception):
    pass


def test_the_settings_of_the_preset_are_planned(monkeypatch):
    seen = []

    def make_plan(model, settings, slice_, **more):
        seen.append(settings)
        raise PlannedError

    monkeypatch.setattr(plan, "make_plan", make_plan)
    for more in ([], ["--size", "480P"], ["--num-videos", "2"]):
        with pytest.raises(PlannedError):
            main(["plan", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "--tpu", "v6e-8", "--preset", "4step", *more])
    assert [(each.height, each.num_videos) for each in seen] == [(720, 1), (480, 1), (720, 2)]
    assert {
        (each.num_inference_steps, each.guidance_scale, each.guidance_scale_2, each.flow_shift) for each in seen
    } == {(4, 1.0, 1.0, 5.0)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--preset", "9step"], "--preset 9step is unknown for model demo; choose from 4step\n"),
        (["demo", "--preset", "auto"], "--preset auto is unknown for model demo; choose from 4step\n"),
        (["demo-image", "--preset", "4step"], "--preset 4step is given, but model demo-image has no presets"),
        (["Lightricks/LTX-Video", "--preset", "4step"], "model Lightricks/LTX-Video has no presets; leave it out"),
    ],
)
def test_a_preset_that_the_model_does_not_have_is_refused(arguments, sentence, capsys):
    assert main(["plan", *arguments, "--tpu", "v6e-8", "--no-compile"]) == 1
    assert sentence in capsys.readouterr().err
