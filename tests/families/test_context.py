"""Context windows: the index lists and weights of ComfyUI's own module, and what is chosen for which video."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.context import (
    ContextWindows,
    choose_method,
    find_windows,
    window_counts,
    window_settings,
    window_weights,
)
from comfy_tpu.families.registry import model_cards
from comfy_tpu.families.settings import make_settings
from tests import comfyui_context_windows

CARDS = {card.name: card for card in model_cards()}
LENGTHS = ((6, 9, 18, 22, 41, 54, 257), (3, 5, 8, 21), (0, 1, 2, 4, 7, 20))
CASES = [(frames, length, overlap) for frames, length, overlap in itertools.product(*LENGTHS) if overlap < length]


def is_usable(windows: list[tuple[int, ...]], frames: int) -> bool:
    """ComfyUI names frames beyond the end, or a frame twice, for strides whose windows are wider than the video."""
    return all(0 <= frame < frames for window in windows for frame in window) and all(
        len(set(window)) == len(window) for window in windows
    )


@pytest.mark.parametrize("schedule", ["static", "uniform", "looped"])
def test_windows_are_those_of_comfyui(schedule: str) -> None:
    module = comfyui_context_windows.load()
    compared = 0
    for (frames, length, overlap), stride, step in itertools.product(CASES, (1, 2, 4), (0, 1, 2, 3, 12)):
        theirs = comfyui_context_windows.handler(schedule, "flat", length, overlap, stride, step)
        expected = [tuple(window) for window in theirs.context_schedule.func(frames, theirs, {})]
        found = ContextWindows(schedule, frames, length, overlap, stride).at(step)  # type: ignore[arg-type]
        if frames > length and is_usable(expected, frames):
            # Where theirs leave frames out, which become NaN there, ours have more behind them.
            assert found[: len(expected)] == expected, (frames, length, overlap, stride, step)
            if {frame for window in expected for frame in window} == set(range(frames)):
                assert len(found) == len(expected)
            compared += 1
    assert compared > 500
    assert module.ContextSchedules.STATIC_STANDARD == "standard_static"


@pytest.mark.parametrize("weights", ["pyramid", "flat", "overlap-linear"])
def test_weights_are_those_of_comfyui(weights: str) -> None:
    module = comfyui_context_windows.load()
    for frames, length, overlap in CASES:
        if frames <= length or (weights == "overlap-linear" and not overlap):  # theirs fails without an overlap
            continue
        theirs = comfyui_context_windows.handler("static", weights, length, overlap)
        context = ContextWindows("static", frames, length, overlap, weights=weights)  # type: ignore[arg-type]
        for window in context.at(0):
            expected = module.get_context_weights(length, frames, list(window), theirs)
            np.testing.assert_allclose(window_weights(context, window), np.asarray(expected), rtol=1e-6)


@pytest.mark.default_cases("uniform")
@pytest.mark.parametrize("schedule", ["static", "uniform", "looped"])
def test_every_frame_is_in_a_window_and_its_shares_add_up_to_one(schedule: str) -> None:
    for (frames, length, overlap), stride, step in itertools.product(CASES, (1, 16), (0, 1, 49)):
        for weights in ("pyramid", "flat", "overlap-linear"):
            context = ContextWindows(schedule, frames, length, overlap, stride, weights)  # type: ignore[arg-type]
            windows = context.at(step)
            totals = [0.0] * frames
            for window, shares in zip(windows, context.shares(windows), strict=True):
                assert len(window) == min(length, frames)
                for frame, share in zip(window, shares, strict=True):
                    totals[frame] += share
            assert totals == pytest.approx([1.0] * frames)


def settings(card: str, **chosen: object) -> GenerationSettings:
    return make_settings(CARDS[card].defaults, chosen, CARDS[card].limits)


@pytest.mark.parametrize(
    ("card", "own", "overlap"),
    [
        ("Wan 2.1", 81, 30),
        ("Wan 2.2", 81, 30),
        ("Wan 2.2 5B", 121, 45),
        ("HunyuanVideo-1.5", 121, 45),
        ("LTX-Video", 161, 60),
    ],
)
def test_windows_have_the_models_own_length(card: str, own: int, overlap: int) -> None:
    made = settings(card)
    assert (made.context_frames, made.context_overlap) == (own, overlap)
    assert settings(card, context_frames=own - 16).context_frames == own - 16


@pytest.mark.parametrize(
    ("card", "chosen", "image", "method"),
    [
        ("Wan 2.1", {"num_frames": 81}, False, "none"),
        ("Wan 2.1", {"num_frames": 121}, False, "none"),  # as nodes allow, and users have run it
        ("Wan 2.1", {"num_frames": 125}, False, "static"),
        ("Wan 2.1", {"num_frames": 1025, "context": "none"}, False, "none"),
        ("Wan 2.1", {"num_frames": 85, "context": "uniform"}, False, "uniform"),
        ("Wan 2.1", {"num_frames": 81, "context": "uniform"}, False, "none"),  # no longer than a window
        ("Wan 2.1 image-to-video", {"num_frames": 161}, True, "continue"),
        ("Wan 2.1 image-to-video", {"num_frames": 161, "context": "static"}, True, "static"),
        ("Wan 2.1 first and last frame", {"num_frames": 161}, True, "static"),
        ("Wan 2.2 5B", {"num_frames": 241}, False, "static"),
        ("Wan 2.2 5B", {"num_frames": 241}, True, "continue"),
    ],
)
def test_what_is_chosen(card: str, chosen: dict[str, object], image: bool, method: str) -> None:
    assert choose_method(CARDS[card], settings(card, **chosen), begins_with_image=image) == method


def test_image_models_have_no_windows() -> None:
    for card in (card for card in CARDS.values() if card.makes_images):
        made = make_settings(card.defaults, {}, card.limits)
        assert choose_method(card, made, begins_with_image=True) == "none"
        assert window_counts(card, made) == (1,)


def test_who_chooses_a_schedule_or_a_length_gives_up_the_models_other_settings_of_windows() -> None:
    own = {"context": "uniform", "context_stride": 2, "context_noise": "freenoise", "context_weights": "flat"}
    own |= {"context_keyframes": 0.2}
    card = CARDS["Wan 2.1"]
    defaults = dataclasses.replace(card.defaults, **own, context_frames=41, context_overlap=21)

    def chosen(**settings: object) -> tuple[object, ...]:
        made = make_settings(defaults, settings, card.limits)
        names = ("context", "context_frames", "context_overlap", "context_stride", "context_noise", "context_weights")
        assert made.context_keyframes == (0.2 if made.context == "uniform" else 0)
        return tuple(getattr(made, name) for name in names)

    assert chosen() == ("uniform", 41, 21, 2, "freenoise", "flat")
    assert chosen(context_overlap=5) == ("uniform", 41, 5, 2, "freenoise", "flat")
    assert chosen(context="static") == ("static", 41, 15, 1, "random", "pyramid")
    assert chosen(context="none") == ("none", 41, 15, 1, "random", "pyramid")
    assert chosen(context_frames=17) == ("auto", 17, 6, 1, "random", "pyramid")


@pytest.mark.parametrize(("frames", "length"), [(41, 21), (8, 3), (22, 21), (251, 21), (3, 2)])
def test_keyframes_reach_from_end_to_end(frames: int, length: int) -> None:
    chosen = ContextWindows("static", frames, length, 1).keyframes()
    distances = {after - before for before, after in itertools.pairwise(chosen)}
    assert (len(chosen), chosen[0], chosen[-1]) == (length, 0, frames - 1)
    assert min(distances) >= 1
    assert max(distances) - min(distances) <= 1


def test_lengths_in_latents() -> None:
    made = settings("Wan 2.1", num_frames=161)
    assert find_windows(CARDS["Wan 2.1"], made, "static") == ContextWindows("static", 41, 21, 8)
    assert window_settings(made) == dataclasses.replace(made, num_frames=81, context="none")
    counts = (81, 85, 161, 165, 1025)
    segments = [CARDS["Wan 2.1"].segment_count(settings("Wan 2.1", num_frames=count)) for count in counts]
    assert segments == [math.ceil((count - 1) / 80) for count in counts]


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"context": "pyramid"}, "context='pyramid' is unknown; choose from auto, none, static, uniform, looped"),
        ({"context": 3}, "context=3 is unknown"),
        ({"context_weights": "steep"}, "context_weights='steep' is unknown; choose from pyramid, flat, overlap-linear"),
        ({"context_noise": "pink"}, "context_noise='pink' is unknown; choose from random, freenoise"),
        ({"context_frames": 80}, "context_frames=80 is not 4n+1; use 77 or 81"),
        ({"context_frames": 1}, "context_frames=1 is not a whole number from 5 to 1025"),
        ({"context_frames": 2049}, "context_frames=2049 is not a whole number from 5 to 1025"),
        ({"context_frames": "many"}, "context_frames='many' is not a whole number"),
        ({"context_overlap": 81}, "context_overlap=81 leaves windows of 81 frames (context_frames) no way on; give 80"),
        ({"context_overlap": 40, "context_frames": 33}, "context_overlap=40 leaves windows of 33 frames"),
        ({"context_overlap": -2}, "context_overlap=-2 is not a whole number of frames; give 0 or more"),
        ({"context_overlap": 1.5}, "context_overlap=1.5 is not a whole number"),
        ({"context_stride": 0, "context": "uniform"}, "context_stride=0 is not allowed; give a whole number from 1"),
        ({"context_stride": 2}, "context_stride=2 is for context=uniform or looped, and context is auto"),
        ({"context_noise": "freenoise", "context": "continue"}, "context_noise=freenoise is for windows"),
        ({"context_keyframes": 1.5}, "context_keyframes=1.5 is not a number from 0 to 1"),
        ({"context_keyframes": math.nan}, "context_keyframes=nan is not a number from 0 to 1"),
        ({"context_keyframes": 0.1, "context": "none"}, "context_keyframes=0.1 is for windows, and context is none"),
    ],
)
def test_refused(chosen: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(text)) as caught:
        settings("Wan 2.1", **chosen)
    assert caught.value.field in chosen


@pytest.mark.parametrize(
    "chosen", [{"context": "static"}, {"context_frames": 17}, {"context_overlap": 4}, {"context_weights": "flat"}]
)
def test_image_models_refuse_windows(chosen: dict[str, object]) -> None:
    (name,) = chosen
    card = next(card for card in CARDS.values() if card.makes_images)
    with pytest.raises(InvalidValueError, match=f"{name}=.* is for long videos and this model makes images; leave it"):
        make_settings(card.defaults, chosen, card.limits)
