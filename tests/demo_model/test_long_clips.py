"""Clips that are longer than the model: what their parts show, and how long videos are judged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from comfy_tpu.families.context import ContextWindows
from comfy_tpu.pipeline.noise import shuffle_noise
from tools.demo_model.captions import MOTIONS, Attributes
from tools.demo_model.clips import FRAMES, draw, make_clips, sample_training_tracks
from tools.demo_model.evaluate_long import SETTLED, find_seam
from tools.demo_model.long_clips import (
    LONGEST,
    OVERLAP,
    WINDOW,
    LongClips,
    encode,
    frames_of,
    repeat_noise,
    sample_beginnings,
    sample_windows,
)
from tools.demo_model.score import observe
from tools.demo_model.shortcuts import encode_latents, take_whole_clips

DEMO = Path(__file__).parents[2] / "src" / "comfy_tpu" / "assets" / "demo"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_long_clip_shows_its_motion_once_and_slowly():
    tracks = sample_training_tracks(12, seeded(3))
    whole = tracks.at(torch.arange(0, 161, 8).expand(12, -1), 161)
    for row, video in enumerate(draw(whole).permute(0, 2, 3, 4, 1).numpy()):
        assert observe(video).motion == whole.attributes(row).motion
    part = tracks.at(torch.arange(FRAMES).expand(12, -1), 161)
    assert float((part.centre[:, -1] - part.centre[:, 0]).abs().max()) < 4
    assert torch.equal(part.angle[:, -1] > 0.2, tracks.motion == MOTIONS.index("spinning"))
    assert float(part.angle.max()) < 0.4  # radians, a tenth of all


def test_beginnings_lie_within_their_videos():
    clips = sample_beginnings(500, 41, seeded(0))
    assert torch.equal(clips.latents, torch.arange(41).expand(500, -1))
    assert int(clips.length.min()) == 161
    assert int(clips.length.max()) == 225


def test_windows_lie_within_their_videos():
    windows = sample_windows(2000, seeded(1))
    assert windows.latents.shape == (2000, WINDOW)
    assert {tuple(row) for row in windows.latents.diff(dim=1).tolist()} == {(1,) * 20, (2,) * 20}
    assert (windows.latents[:, 0] >= 0).all()
    assert (4 * windows.latents[:, -1] < windows.length).all()
    assert 0.6 < float((windows.latents[:, 0] == 0).float().mean()) < 0.8
    assert int(windows.length.min()) == 81
    assert int(windows.length.max()) == 225
    assert 0.45 < float((windows.length == 161).float().mean()) < 0.55
    assert 50 < int(windows.latents.max()) <= 56


def test_noise_is_repeated_as_the_pipeline_repeats_it():
    """Which latents of a video have equal noise: the same number of them, none of them within one window's length."""
    context = ContextWindows("uniform", frames=LONGEST, length=WINDOW, overlap=OVERLAP, stride=2)
    noise = torch.randn(1, 1, LONGEST, 1, 1, generator=seeded(6))
    ours = shuffle_noise(noise, context, seed=7).flatten()
    spans = torch.arange(LONGEST - WINDOW + 1)[:, None] + torch.arange(WINDOW)
    base = noise[:, :, :WINDOW].expand(len(spans), -1, -1, -1, -1)
    trained = repeat_noise(base, spans, seeded(8))[:, 0, :, 0, 0]
    blocks = range(0, LONGEST - WINDOW, WINDOW - OVERLAP)
    for row, start in enumerate(spans[:, 0].tolist()):
        if start in blocks:
            assert len(set(trained[row].tolist())) == len(set(ours[start : start + WINDOW].tolist())) == WINDOW
        assert set(trained[row].tolist()) <= set(noise.flatten()[:WINDOW].tolist())
    torch.testing.assert_close(trained[0], noise.flatten()[:WINDOW])
    assert sorted(trained[10].tolist()) == sorted(ours[10 : 10 + WINDOW].tolist())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_latent_is_that_of_the_clip_that_ends_with_it():
    vae = AutoencoderKLWan.from_pretrained(DEMO / "vae").eval()
    take_whole_clips(vae)
    tracks, length = sample_training_tracks(1, seeded(2)), torch.tensor([161])
    latents = encode(vae, LongClips(tracks, length, torch.tensor([[0, 2, 9]])))
    beginning = encode_latents(vae, draw(tracks.at(torch.arange(FRAMES)[None], 161)))
    later = encode_latents(vae, draw(tracks.at(20 + torch.arange(FRAMES)[None], 161)))
    torch.testing.assert_close(latents[:, :, 0], beginning[:, :, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(latents[:, :, 1], beginning[:, :, 2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(latents[:, :, 2], later[:, :, 4], rtol=1e-4, atol=1e-4)


def test_a_decoder_makes_the_frames_from_the_first_latents_last_one_on():
    clips = LongClips(sample_training_tracks(2, seeded(4)), torch.tensor([129, 161]), torch.tensor([[0, 1], [7, 8]]))
    frames = frames_of(clips, 0, 5)
    expected = clips.tracks.at(torch.tensor([[0, 1, 2, 3, 4], [28, 29, 30, 31, 32]]), clips.length)
    torch.testing.assert_close(frames.centre, expected.centre)


def test_a_jump_is_a_seam_and_a_steady_motion_is_none():
    video = draw(make_clips([Attributes("red", "circle", "left", "black")], seeded(5)))[0].permute(1, 2, 3, 0).numpy()
    assert find_seam(video) < 1.5
    jumping = np.concatenate([video, video])
    assert find_seam(jumping) > 2
    assert find_seam(jumping, begin=SETTLED) > 2
    assert find_seam(jumping, begin=SETTLED + 1) < 1.5
