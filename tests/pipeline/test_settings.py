"""What a user may choose, and the sentence for what not."""

import dataclasses
import math
from typing import Any

import pytest

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.settings import check_prompt, make_settings
from comfy_tpu.families.wan.model import WAN21, WAN22
from comfy_tpu.pipeline.checks import warn_of_ignored

BAD: list[tuple[dict[str, Any], str]] = [
    ({"height": 100}, "height=100 is not divisible by 16; use 96 or 112"),
    ({"width": 2040}, "width=2040 is not divisible by 16; use 2032 or 2048"),
    ({"height": 0}, "height=0 is outside 16 to 2048"),
    ({"width": 48.0}, "width=48.0 is not a whole number"),
    ({"num_frames": 80}, r"num_frames=80 is not 4n\+1; use 77 or 81"),
    ({"num_frames": 0}, "num_frames=0 is not a whole number from 1 to 1025"),
    ({"num_inference_steps": 0}, "num_inference_steps=0 is not allowed; give a whole number from 1 to 1000"),
    ({"guidance_scale": math.nan}, "guidance_scale=nan is not a number from 0 to 100"),
    ({"guidance_scale": -1}, "guidance_scale=-1 is not a number from 0"),
    ({"flow_shift": 0.0}, "flow_shift=0.0 is not a number from 0.01"),
    ({"flow_shift": math.inf}, "flow_shift=inf is not a number"),
    ({"reuse": -0.1}, "reuse=-0.1 is not a number from 0 to 1"),
    ({"reuse": math.nan}, "reuse=nan is not a number from 0 to 1"),
    ({"reuse": 12}, "reuse=12 is not a number from 0 to 1"),
    ({"reuse": True}, "reuse=True is not a number"),
    ({"guidance_until": 1.01}, "guidance_until=1.01 is not a number from 0 to 1"),
    ({"guidance_until": -1}, "guidance_until=-1 is not a number from 0 to 1"),
    ({"guidance_until": math.inf}, "guidance_until=inf is not a number from 0 to 1"),
    ({"seed": -1}, "seed=-1 is not a whole number from 0 to 2"),
    ({"seed": 1.5}, "seed=1.5 is not a whole number"),
    ({"seed": True}, "seed=True is not a whole number"),
    ({"max_sequence_length": 0}, "max_sequence_length=0 is not allowed; give a whole number from 1 to 512"),
    ({"scheduler": "ddim"}, r"scheduler='ddim' is unknown; choose from unipc, euler, dpm\+\+"),
    ({"num_videos": 0}, "num_videos=0 is not allowed; give a whole number from 1 to 64"),
    ({"fps": 0}, "fps=0 is not allowed; give a whole number from 1 to 240"),
    ({"negative_prompt": 3}, "negative_prompt is a int, expected text"),
    ({"steps": 3}, "steps is not a setting; choose from audio_guidance_rescale, audio_guidance_scale"),
]


@pytest.mark.parametrize(("chosen", "text"), BAD)
def test_a_bad_value_is_named_with_what_would_do(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{text}"):
        make_settings(WAN21.card.defaults, chosen, WAN21.card.limits)


def test_what_is_not_chosen_stays_the_default() -> None:
    settings = make_settings(WAN21.card.defaults, {"seed": 3, "height": None}, WAN21.card.limits)
    own = {"context_frames": 81, "context_overlap": 30}  # those of windows follow from the model's length
    assert settings == dataclasses.replace(WAN21.card.defaults, seed=3, **own)


def test_every_default_and_preset_is_allowed() -> None:
    for preset in ({}, *WAN21.card.sizes.values()):
        make_settings(WAN21.card.defaults, preset, WAN21.card.limits)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(InvalidValueError, match="is empty; say what the video should show"):
        check_prompt(prompt)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="prompt is a int, expected text"):
        check_prompt(5)  # type: ignore[arg-type]


def test_a_second_guidance_scale_says_where_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    chosen = dataclasses.replace(WAN21.card.defaults, guidance_scale_2=3.0)
    for family in (WAN22, WAN21):
        warn_of_ignored(family, family.card.defaults, dataclasses.replace(family.card.defaults, guidance_scale_2=2.0))
    assert caplog.messages == ["guidance_scale_2=2.0 has no effect: Wan 2.1 has one transformer"]
    caplog.clear()
    warn_of_ignored(WAN21, chosen, chosen)
    assert caplog.messages == [], "nobody chose it"
