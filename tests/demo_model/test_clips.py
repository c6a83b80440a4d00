"""The drawing: seeded, inside the image, and true to the grammar."""

from collections import Counter

import pytest
import torch

from tools.demo_model.captions import BACKGROUNDS, HELD_OUT_TRIPLES, MOTIONS, SHAPES, Attributes
from tools.demo_model.clips import (
    FRAMES,
    SIZE,
    draw,
    evaluation_prompts,
    make_clips,
    sample_held_out,
    sample_training,
)
from tools.demo_model.score import observe


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_the_training_sampler_never_gives_a_held_out_triple():
    batch = sample_training(5_000, seeded(0))
    triples = {batch.attributes(row).triple for row in range(len(batch.colour))}
    assert len(triples) == 224
    assert triples.isdisjoint(HELD_OUT_TRIPLES)
    held_out = sample_held_out(2_000, seeded(0))
    assert {held_out.attributes(row).triple for row in range(2_000)} == set(HELD_OUT_TRIPLES)


def test_same_seed_same_clips():
    first, second, other = (draw(sample_training(4, seeded(seed))) for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.shape == (4, 3, FRAMES, SIZE, SIZE)
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1


@pytest.mark.parametrize("centred", [0.0, 1.0])
def test_nothing_touches_the_border(centred):
    batch = sample_training(40, seeded(1), centred)
    video = draw(batch)
    background = torch.tensor(list(BACKGROUNDS.values()))[batch.background][:, :, None, None]
    for edge in (video[..., 0, :], video[..., -1, :], video[..., 0], video[..., -1]):
        torch.testing.assert_close(edge, background.expand_as(edge), atol=1e-6, rtol=0)


def test_a_centred_first_frame_says_nothing_of_the_motion():
    batch = make_clips([Attributes("red", "star", motion, "black") for motion in MOTIONS], seeded(7), centred=1.0)
    assert float((batch.centre[:, 0] - SIZE / 2).abs().max()) < 1
    assert 8 <= float(batch.radius[:, 0].min()) <= float(batch.radius[:, 0].max()) <= 9.5
    videos = draw(batch).permute(0, 2, 3, 4, 1).numpy()
    assert [observe(video).motion for video in videos] == list(MOTIONS)


def test_a_share_of_the_clips_begins_centred():
    centre = sample_training(2000, seeded(8), centred=0.5).centre[:, 0]
    share = ((centre - SIZE / 2).abs().amax(-1) < 0.7).float().mean()
    assert 0.45 < float(share) < 0.56


def test_a_share_of_the_clips_spins_and_none_of_them_is_held_out():
    batch = sample_training(4000, seeded(9), spinning=0.3)
    share = (batch.motion == MOTIONS.index("spinning")).float().mean()
    assert 0.36 < float(share) < 0.42, "0.3, and an eighth of the rest"
    assert {batch.attributes(row).triple for row in range(4000)}.isdisjoint(HELD_OUT_TRIPLES)


def test_two_hundred_held_out_prompts_ask_for_every_triple_equally_often():
    prompts = evaluation_prompts(200, 200, seed=2025)
    asked = Counter(wanted.triple for _, wanted in prompts)
    assert set(asked) == set(HELD_OUT_TRIPLES)
    assert set(asked.values()) == {6, 7}
    assert len({text for text, _ in prompts}) > 190


@pytest.mark.parametrize("shape", SHAPES)
def test_still_is_still_and_spinning_is_visible(shape):
    batch = make_clips([Attributes("red", shape, motion, "black") for motion in ("still", "spinning")], seeded(2))
    still, spinning = draw(batch)
    assert torch.equal(still, still[:, :1].expand_as(still))
    moved = (spinning[0, 1:] - spinning[0, :-1]).abs().amax(dim=(1, 2))
    assert float(moved.min()) > 0.2


def test_a_large_and_a_small_shape_are_drawn_with_their_area():
    attributes = [Attributes("red", shape, "still", "black") for shape in SHAPES]
    batch = make_clips(attributes, seeded(3))
    video = draw(batch)
    covered = (video[:, 0, 0] - 0.03).sum(dim=(1, 2)) / 0.87
    radius = batch.radius[:, 0]
    ideal = {
        "circle": torch.pi * radius**2,
        "square": 2 * (1.2 * radius) ** 2,
        "triangle": 0.75 * 3**0.5 * (1.35 * radius) ** 2,
        "star": 5 * 0.45 * (1.3 * radius) ** 2 * torch.sin(torch.tensor(torch.pi / 5)),
    }
    for row, shape in enumerate(SHAPES):
        assert float(covered[row]) == pytest.approx(float(ideal[shape][row]), rel=0.03)


def test_motions_are_numbered_in_the_order_of_the_grammar():
    batch = make_clips([Attributes("blue", "star", motion, None) for motion in MOTIONS], seeded(4))
    assert batch.motion.tolist() == list(range(len(MOTIONS)))
