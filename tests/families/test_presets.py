"""Presets: their settings, the files that are recognised, and what is said where the two do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard, Preset
from comfy_tpu.families.card_checks import CardError, check_card
from comfy_tpu.families.flux import card as flux
from comfy_tpu.families.flux2 import card as flux2
from comfy_tpu.families.hunyuan_video import card as hunyuan
from comfy_tpu.families.ltx2 import card as ltx2
from comfy_tpu.families.presets import (
    AUTO,
    PresetChoice,
    Recognition,
    describe_settings,
    find_preset,
    make_choice,
    recognise_file,
)
from comfy_tpu.families.registry import load_family, model_cards
from comfy_tpu.families.settings import make_settings, merge_choices
from comfy_tpu.families.wan import card as wan
from comfy_tpu.pipeline.initial import first_step
from comfy_tpu.pipeline.schedule import make_schedule
from comfy_tpu.pipeline.step_plan import make_plan

# Names as their makers gave them. Of the second kind the folder says it, in the hub's cache and beside it.
PUBLISHED: list[tuple[ModelCard, str, str | None]] = [
    (wan.WAN21, "wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors", "4step"),
    (wan.WAN21_IMAGE, "wan2.1_i2v_lora_rank64_lightx2v_4step.safetensors", "4step"),
    (wan.WAN21, "lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16.safetensors", "4step"),
    (wan.WAN21, "Wan21_CausVid_14B_T2V_lora_rank32_v2.safetensors", "causvid"),
    (wan.WAN21, "lightx2v_8steps.safetensors", "8step"),
    (wan.WAN22, "wan2.2_t2v_A14b_low_noise_lora_rank64_lightx2v_4step_1217.safetensors", "4step"),
    (wan.WAN22, "Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16.safetensors", "4step"),
    (wan.WAN22, "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model.safetensors", "4step"),
    (wan.WAN22_IMAGE, "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors", "4step"),
    (flux.FLUX_DEV, "Hyper-FLUX.1-dev-8steps-lora.safetensors", "8step"),
    (ltx2.LTX2, "ltx-2-19b-distilled-lora-384.safetensors", "8step"),
    (ltx2.LTX23, "ltx-2.3-22b-distilled-lora-384.safetensors", "8step"),
    (ltx2.LTX23, "ltx-2.3-22b-ic-lora-hdr-0.9.safetensors", None),
    (flux.FLUX_DEV, "Hyper-FLUX.1-dev-16steps-lora.safetensors", "16step"),
    (
        flux.FLUX_DEV,
        "models--alimama-creative--FLUX.1-Turbo-Alpha/snapshots/7b29/diffusion_pytorch_model.safetensors",
        "turbo",
    ),
    (flux2.FLUX2_DEV, "models--fal--FLUX.2-dev-Turbo/snapshots/9ee5/pytorch_lora_weights.safetensors", "turbo"),
    (hunyuan.HUNYUAN15, "hy1.5_t2v_480p_lightx2v_4step.safetensors", "4step"),
    (wan.WAN21, "my_cat_2400steps.safetensors", None),
    (wan.WAN21, "4step-tests/my_cat.safetensors", None),
    (wan.WAN21, "style.safetensors", None),
]


@pytest.mark.parametrize(("card", "path", "preset"), PUBLISHED, ids=[path for _, path, _ in PUBLISHED])
def test_a_file_is_recognised_by_its_name(card, path, preset):
    assert recognise_file(Path("/loras") / path, {}, card.presets) == preset


def test_metadata_go_before_names():
    presets = wan.WAN21.presets
    assert recognise_file(Path("x_4step.safetensors"), {"comfy_tpu.preset": "8step"}, presets) == "8step"
    assert recognise_file(Path("x.safetensors"), {"comfy_tpu.preset": "unknown"}, presets) is None
    assert recognise_file(Path("x.safetensors"), {"modelspec.title": "Wan 2.1 CausVid"}, presets) == "causvid"


def settings_of(card: ModelCard, name: str, **chosen: Any) -> GenerationSettings:
    return make_settings(card.defaults, merge_choices(card.presets[name].settings, chosen), card.limits)


CARDS = [(card, name) for card in model_cards() for name in card.presets]


@pytest.mark.parametrize(("card", "name"), CARDS, ids=[f"{card.name} {name}" for card, name in CARDS])
def test_every_preset_makes_a_schedule_of_its_steps(card, name):
    settings = settings_of(card, name)
    scheduler = load_family(card.name).scheduling.factories[settings.scheduler](settings)
    schedule = make_schedule(scheduler)
    assert len(schedule) == settings.num_inference_steps
    assert 0.99 < schedule.sigmas[0] <= 1
    assert (np.diff(schedule.sigmas) < 0).all()


def test_four_steps_are_those_that_lightx2v_distils_for():
    """Timesteps 1000, 750, 500 and 250 of 1000, shifted by 5; Euler, so each step goes to the next one's level."""
    settings = settings_of(wan.WAN21, "4step")
    schedule = make_schedule(load_family("Wan 2.1").scheduling.factories[settings.scheduler](settings))
    levels = np.array([1000, 750, 500, 250]) / 1000
    shifted = 5 * levels / (1 + 4 * levels)
    np.testing.assert_allclose(schedule.sigmas, shifted, atol=1e-6)
    np.testing.assert_allclose(schedule.timesteps, 1000 * shifted, atol=1e-3)
    expected = np.zeros_like(schedule.coefficients)
    expected[:, 0], expected[:, 3] = 1, np.diff([*shifted, 0.0])
    np.testing.assert_allclose(schedule.coefficients, expected, atol=1e-6)


@pytest.mark.parametrize("card", [wan.WAN22, wan.WAN22_IMAGE], ids=lambda card: card.name)
def test_each_of_two_transformers_has_two_of_four_steps_without_guidance(card):
    settings = settings_of(card, "4step")
    schedule = make_schedule(load_family(card.name).scheduling.factories[settings.scheduler](settings))
    plan = make_plan(schedule, settings, None)
    assert [step.transformer for step in plan] == [0, 0, 1, 1]
    assert plan.guided == 0
    assert plan.forwards == 4


def test_causvids_noise_levels_are_its_own():
    settings = settings_of(wan.WAN21, "causvid")
    schedule = make_schedule(load_family("Wan 2.1").scheduling.factories[settings.scheduler](settings))
    expected = [999, 934, 862, 756, 603, 410, 250, 140, 74]
    np.testing.assert_allclose(schedule.timesteps, expected, atol=1e-3)


def test_noise_levels_are_shifted_as_diffusers_shifts_those_of_a_pipeline():
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    settings = settings_of(flux2.FLUX2_DEV, "turbo")
    ours = load_family("Flux.2 dev").scheduling.factories["euler"](settings)
    theirs = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = compute_empirical_mu(image_seq_len=64 * 64, num_steps=8)
    theirs.set_timesteps(sigmas=[float(level) for level in settings.sigmas.split(",")], mu=mu)
    np.testing.assert_allclose(ours.sigmas.numpy(), theirs.sigmas.numpy(), atol=1e-6)


@pytest.mark.parametrize("card", [ltx2.LTX2, ltx2.LTX23], ids=lambda card: card.name)
def test_distilled_ltx2_has_the_noise_levels_of_diffusers_whatever_the_size(card):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES

    published = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}
    theirs = FlowMatchEulerDiscreteScheduler.from_config(published, use_dynamic_shifting=False, shift_terminal=None)
    theirs.set_timesteps(sigmas=DISTILLED_SIGMA_VALUES)
    for size in ({"height": 64, "width": 64}, {"height": 1088, "width": 1920, "num_frames": 257}):
        settings = settings_of(card, "8step", **size)
        ours = load_family(card.name).scheduling.factories[settings.scheduler](settings)
        np.testing.assert_allclose(ours.sigmas.numpy(), theirs.sigmas.numpy(), atol=1e-7)
        plan = make_plan(make_schedule(ours), settings, None)
        assert (plan.guided, plan.forwards) == (0, 8)
        second_pass = ours.sigmas[first_step(card, 8, 0.375) : -1]  # --upscale-strength, as the documentation has it
        np.testing.assert_allclose(second_pass.numpy(), STAGE_2_DISTILLED_SIGMA_VALUES, atol=1e-7)


def test_a_chosen_value_goes_before_the_presets():
    settings = settings_of(wan.WAN21, "4step", num_inference_steps=6, flow_shift=8.0)
    assert (settings.num_inference_steps, settings.flow_shift, settings.guidance_scale) == (6, 8.0, 1.0)
    assert settings.scheduler == "euler-trailing"


def test_steps_and_noise_levels_decide_each_other():
    assert settings_of(wan.WAN21, "causvid", num_inference_steps=4).sigmas == ""
    assert settings_of(wan.WAN21, "4step", sigmas="1,0.5").num_inference_steps == 2
    assert make_settings(GenerationSettings(scheduler="euler"), {"sigmas": "1,0.5"}, wan.WAN21.limits) == (
        dataclasses.replace(
            make_settings(GenerationSettings(), {}, wan.WAN21.limits),
            scheduler="euler",
            sigmas="1,0.5",
            num_inference_steps=2,
        )
    )


BAD_SIGMAS = {
    "1,x": "sigmas='1,x' are not noise levels; give numbers that fall, from 1 at most to above 0: 1,0.75",
    "0.5,1": "are not noise levels",
    "1.5,1": "are not noise levels",
    "1,0": "are not noise levels",
    "1,nan": "are not noise levels",
    ",": "are not noise levels",
    False: "are not noise levels",
    b"1": "are not noise levels",
}


@pytest.mark.parametrize(("sigmas", "sentence"), BAD_SIGMAS.items())
def test_bad_noise_levels_are_refused(sigmas, sentence):
    with pytest.raises(InvalidValueError, match=sentence) as met:
        settings_of(wan.WAN21, "4step", sigmas=sigmas)
    assert met.value.field == "sigmas"


def test_noise_levels_want_an_euler_scheduler_and_their_own_number():
    with pytest.raises(InvalidValueError, match="are for an Euler scheduler, and scheduler=unipc has its own; choose"):
        make_settings(wan.WAN21.defaults, {"sigmas": "1,0.5"}, wan.WAN21.limits)
    with pytest.raises(InvalidValueError, match="are 2 steps, and num_inference_steps=3; leave one of them out"):
        settings_of(wan.WAN21, "4step", sigmas="1,0.5", num_inference_steps=3)


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(
        InvalidValueError, match="preset=5step is unknown for model m; choose from 4step, 8step, causvid"
    ):
        find_preset(wan.WAN21.presets, "5step", "m")
    with pytest.raises(InvalidValueError, match="preset=4step is given, but model m has no presets; leave it out"):
        find_preset({}, "4step", "m")


LORA = Recognition("lora", "x_4step.safetensors", "4step")


def said(choice: PresetChoice, settings: GenerationSettings, **more: bool) -> list[str]:
    return [sentence for _, sentence in choice.warnings(settings, **{"has_branches": True, **more})]


def test_a_distilled_lora_with_many_steps_and_guidance_is_one_sentence():
    choice = make_choice(wan.WAN21.presets, [LORA], None, "m")
    assert said(choice, wan.WAN21.defaults) == [
        "lora=x_4step.safetensors was distilled for 4 steps at guidance_scale 1, and this run has "
        "num_inference_steps=50 and guidance_scale=5; choose preset=4step, or auto"
    ]
    fits = settings_of(wan.WAN21, "4step")
    assert said(choice, fits) == []
    assert said(choice, dataclasses.replace(fits, num_inference_steps=8)) == []
    assert len(said(choice, dataclasses.replace(fits, num_inference_steps=3))) == 1
    assert len(said(choice, dataclasses.replace(fits, guidance_scale=2.0))) == 1
    assert said(choice, dataclasses.replace(fits, guidance_scale=2.0), has_branches=False) == []


def test_a_preset_without_anything_distilled_is_one_sentence():
    (sentence,) = said(make_choice(wan.WAN21.presets, [], "4step", "m"), settings_of(wan.WAN21, "4step"))
    assert sentence.startswith(
        "preset=4step is for a model or a LoRA that was distilled for it, such as those of light"
    )
    assert said(make_choice(flux.FLUX_SCHNELL.presets, [], "4step", "m"), flux.FLUX_SCHNELL.defaults) == []
    own = {"4step": Preset(wan.WAN21.presets["4step"].settings, lora="lora/x.safetensors")}
    assert said(make_choice(own, [], "4step", "m"), settings_of(wan.WAN21, "4step")) == []


def test_a_lora_for_another_strength_is_one_sentence():
    settings = settings_of(flux.FLUX_DEV, "8step")
    hyper = Recognition("lora", "/l/Hyper-FLUX.1-dev-8steps-lora.safetensors", "8step")
    (sentence,) = said(make_choice(flux.FLUX_DEV.presets, [hyper], "8step", "m"), settings, has_branches=False)
    assert sentence.endswith(
        "is made for strength 0.125, and has 1; give Hyper-FLUX.1-dev-8steps-lora.safetensors:0.125"
    )
    scaled = dataclasses.replace(hyper, strength=0.125)
    assert said(make_choice(flux.FLUX_DEV.presets, [scaled], "8step", "m"), settings, has_branches=False) == []


def test_auto_takes_what_is_recognised_and_else_nothing():
    assert make_choice(wan.WAN21.presets, [LORA], AUTO, "m").name == "4step"
    assert make_choice(wan.WAN21.presets, [], AUTO, "m").settings == {}
    assert make_choice({}, [], AUTO, "m").name is None


def test_settings_are_described_in_one_line():
    described = describe_settings(wan.WAN22.presets["4step"].settings)
    assert described == "4 steps, guidance_scale 1, scheduler euler-trailing, flow_shift 5, guidance_scale_2 1"


BAD_PRESETS = {
    "its preset x has heigth, which is no setting": {"x": Preset({"heigth": 1})},
    "its preset x cannot be used: num_inference_steps=0": {"x": Preset({"num_inference_steps": 0})},
    "its preset 'auto' is not named": {"auto": Preset({})},
    "its preset 'Four Steps' is not named": {"Four Steps": Preset({})},
    "its preset x has the pattern '\\(', which is none": {"x": Preset({}, patterns=("(",))},
    "its preset 720P is a dict, expected a Preset; names of sizes belong to sizes": {"720P": {"height": 720}},
}


@pytest.mark.parametrize(("problem", "presets"), BAD_PRESETS.items(), ids=list(BAD_PRESETS))
def test_a_card_with_a_bad_preset_is_refused(problem, presets):
    model = dataclasses.replace(wan.WAN21, presets=presets)
    nodes = dataclasses.replace(wan.CARD.node_sets[0], models=(model,))
    with pytest.raises(CardError, match=problem):
        check_card(dataclasses.replace(wan.CARD, node_sets=(nodes,)))
