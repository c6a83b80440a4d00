"""The scorer: right on drawn clips, and not to be fooled by wrong ones."""

from collections import Counter

import numpy as np
import pytest
import torch

from tools.demo_model.captions import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Attributes
from tools.demo_model.clips import FRAMES, SIZE, draw, make_clips, sample_held_out, sample_training
from tools.demo_model.score import Observation, observe

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up", "growing": "shrinking"}
OPPOSITE |= {"shrinking": "growing", "still": "still", "spinning": "spinning"}


def videos(batch):
    return draw(batch).permute(0, 2, 3, 4, 1).numpy()


def one(attributes, seed=0):
    return videos(make_clips([attributes], torch.Generator().manual_seed(seed)))[0]


@pytest.mark.slow
def test_drawn_clips_are_seen_right():
    right = Counter()
    generator = torch.Generator().manual_seed(11)
    batches = [sample_training(160, generator), sample_held_out(50, generator)]
    for batch in batches:
        for row, video in enumerate(videos(batch)):
            right.update(name for name, agrees in observe(video).agrees(batch.attributes(row)).items() if agrees)
    assert {name: count / 210 for name, count in right.items()} == pytest.approx(
        dict.fromkeys(("colour", "shape", "motion", "background"), 1.0), abs=0.01
    )


@pytest.mark.parametrize("motion", MOTIONS)
def test_backwards_is_the_opposite_motion(motion):
    wanted = Attributes("green", "triangle", motion, "white")
    assert observe(one(wanted)[::-1]).motion == OPPOSITE[motion]


@pytest.mark.parametrize("shape", SHAPES)
def test_another_shape_or_colour_is_told(shape):
    for colour in COLOURS:
        seen = observe(one(Attributes(colour, shape, "right", "gray"), seed=5))
        for other in SHAPES:
            assert seen.agrees(Attributes(colour, other, "right", "gray"))["shape"] == (other == shape)
        for other in COLOURS:
            assert seen.agrees(Attributes(other, shape, "right", "gray"))["colour"] == (other == colour)


def test_a_colour_outside_the_palette_is_none_of_it():
    video = one(Attributes("red", "square", "up", "black"))
    assert observe(video[..., [1, 1, 1]] * 0 + (video[..., :1] > 0.4) * 0.75).colour is None


def test_a_blot_is_no_shape():
    rng = np.random.default_rng(0)
    video = np.zeros((FRAMES, SIZE, SIZE, 3))
    for _ in range(14):
        y, x = rng.integers(14, 44, 2)
        video[:, y : y + 3, x : x + 14] = COLOURS["red"]
        video[:, x : x + 14, y : y + 3] = COLOURS["red"]
    seen = observe(video)
    assert (seen.colour, seen.shape, seen.motion) == ("red", None, "still")


@pytest.mark.parametrize("first", ["left", "growing"])
def test_there_and_back_again_is_none_of_the_motions(first):
    video = one(Attributes("blue", "circle", first, "black"))
    seen = observe(np.concatenate([video[::2], video[::-1][2::2]]))
    assert seen.motion is None
    assert seen.colour == "blue"


def test_two_motions_at_once_are_none():
    batch = make_clips([Attributes("cyan", "square", motion, "black") for motion in ("right", "growing")], _seed(1))
    batch.radius[0] = batch.radius[1] * 0.8
    assert observe(videos(batch)[0]).motion is None


def test_an_object_that_jumps_is_not_still():
    video = one(Attributes("blue", "star", "still", "black"))
    video[6:9] = np.roll(video[6:9], 6, axis=2)
    assert observe(video).motion is None


def test_noise_and_emptiness_show_nothing():
    rng = np.random.default_rng(0)
    noise = observe(rng.random((FRAMES, SIZE, SIZE, 3)))
    assert (noise.colour, noise.shape, noise.motion) == (None, None, None)
    black = np.zeros((FRAMES, SIZE, SIZE, 3))
    assert observe(black) == Observation(background="black")
    assert observe(np.full_like(black, 0.97)) == Observation(background="white")
    assert observe(black * np.nan) == Observation()
    object_comes_late = one(Attributes("red", "star", "still", "black"))
    object_comes_late[:5] = BACKGROUNDS["black"]
    assert observe(object_comes_late).motion is None


def test_soft_edges_and_a_little_noise_do_not_matter():
    generator = torch.Generator().manual_seed(12)
    batch = sample_training(40, generator)
    clean = draw(batch).transpose(1, 2).flatten(0, 1)
    soft = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(clean, (1,) * 4, mode="replicate"), 3, stride=1)
    soft = (soft + 0.03 * torch.randn(soft.shape, generator=generator)).clamp(0, 1)
    soft = soft.unflatten(0, (40, FRAMES)).permute(0, 1, 3, 4, 2).numpy()
    wrong = [row for row, video in enumerate(soft) if not all(observe(video).agrees(batch.attributes(row)).values())]
    assert wrong == []


def test_what_is_no_video_is_refused():
    with pytest.raises(ValueError, match=r"an array \[frames, height, width, 3\], got \(3, 17, 64, 64\)"):
        observe(np.zeros((3, 17, 64, 64)))


def _seed(number):
    return torch.Generator().manual_seed(number)
