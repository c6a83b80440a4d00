"""What a decoder learns of long videos, and the average of two of them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from tools.demo_model import long_clips
from tools.demo_model.average import average
from tools.demo_model.clips import draw
from tools.demo_model.denoised_latents import denoise_clips
from tools.demo_model.long_decoding import SWAPPED, LongClipPool, LongDecoding
from tools.demo_model.shortcuts import take_whole_clips
from tools.demo_model.train_vae import VaeTraining, _distance

DEMO = Path(__file__).parents[2] / "src" / "comfy_tpu" / "assets" / "demo"
SETTINGS = LongDecoding(
    clips=3, latents=4, batch=4, frames=9, beginnings=1.0, noise=0.0, lasting=0.0, swapped=0.0, hard=1.0, denoised_by=""
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def pool() -> LongClipPool:
    vae = AutoencoderKLWan.from_pretrained(DEMO / "vae").eval()
    take_whole_clips(vae)
    return LongClipPool(vae, SETTINGS, torch.Generator().manual_seed(6))


@torch.no_grad()
def test_parts_are_decoded_beside_their_drawings(pool):
    drawn, decoded = pool.decode()
    assert drawn.shape == decoded.shape == (4, 3, 9, 64, 64)
    assert float((drawn - decoded).square().mean()) < 0.004  # 30 dB; another clip's drawing is below 20
    assert float((drawn - decoded.roll(1, dims=0)).square().mean()) > 0.02


def test_the_worst_clips_are_chosen_more_often(pool):
    assert pool._errors.shape == (3, 2)  # 13 frames in parts of 9
    pool._errors[:] = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    assert pool._choose(0).tolist() == [0, 0, 0, 0]
    assert pool._choose(1).tolist() == [2, 2, 2, 2]
    evenly = LongClipPool.__new__(LongClipPool)
    evenly.__dict__ |= {**pool.__dict__, "_settings": dataclasses.replace(SETTINGS, batch=60, hard=0.0)}
    assert set(evenly._choose(0).tolist()) == {0, 1, 2}


def test_noise_that_lasts_is_the_same_in_all_latents_of_a_clip(pool):
    lasting = LongClipPool.__new__(LongClipPool)
    lasting.__dict__ |= {**pool.__dict__, "_settings": dataclasses.replace(SETTINGS, lasting=0.2)}
    noise = lasting._noise(pool._latents)
    assert torch.equal(noise, noise[:, :, :1].expand_as(noise))
    deviations = noise.std(dim=(1, 2, 3, 4))
    assert 0 < float(deviations.min()) < float(deviations.max()) < 0.22
    assert not torch.equal(noise[0], noise[1])


def test_a_part_has_some_latents_of_its_own_before_it_and_another_clips_before_these(pool):
    latents = torch.arange(40.0).expand(2, 1, 40) + torch.tensor([0.0, 100.0])[:, None, None]
    for _ in range(20):
        swapped = pool._swap_before(latents[..., None, None], 30)[0, 0, :, 0, 0]
        own = int((swapped < 100).sum())
        assert 40 - 30 + SWAPPED[0] <= own <= 40 - 30 + SWAPPED[1]
        assert torch.equal(swapped[40 - own :], latents[0, 0, 40 - own :])
        assert torch.equal(swapped[: 40 - own], latents[1, 0, : 40 - own])


@pytest.mark.thorough
def test_latents_are_as_the_transformer_makes_them_and_still_show_their_clip():
    vae = AutoencoderKLWan.from_pretrained(DEMO / "vae").eval()
    take_whole_clips(vae)
    generator = torch.Generator().manual_seed(2)
    clips = long_clips.sample_beginnings(1, long_clips.WINDOW, generator)
    drawn = torch.cat([long_clips.encode(vae, clips), torch.zeros(1, 16, 3, 8, 8)], dim=2)
    made = denoise_clips(DEMO, clips, drawn, generator)
    window = slice(0, long_clips.WINDOW)
    distance = float((made - drawn)[:, :, window].square().mean() / drawn[:, :, window].square().mean())
    assert 1e-4 < distance < 0.05
    assert torch.equal(made[:, :, long_clips.WINDOW :], drawn[:, :, long_clips.WINDOW :])  # no window is left for them


def test_steadiness_counts_errors_that_change():
    video = draw(long_clips.frames_of(long_clips.sample_beginnings(1, 3, torch.Generator().manual_seed(1)), 0, 5))
    steady, loose = VaeTraining(steady=1.0), VaeTraining()
    offset = torch.full_like(video, 0.1)
    wobble = offset * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None, None]

    def cost(difference: torch.Tensor) -> float:
        return float(_distance(difference, video, steady, 0.0) - _distance(difference, video, loose, 0.0))

    assert cost(offset) == pytest.approx(0.001, rel=0.01)
    assert cost(wobble) == pytest.approx(0.2, rel=0.01)


def test_an_average_has_the_weights_of_all_and_leaves_the_rest_alone(tmp_path):
    vae = AutoencoderKLWan.from_pretrained(DEMO / "vae")
    vae.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        vae.decoder.conv_in.weight += 1
    vae.save_pretrained(tmp_path / "b")
    average([(tmp_path / "a", 0.25), (tmp_path / "b", 0.75)], tmp_path / "mean")
    first, mean = (AutoencoderKLWan.from_pretrained(tmp_path / name).state_dict() for name in ("a", "mean"))
    for name, weight in first.items():
        if name == "decoder.conv_in.weight":
            torch.testing.assert_close(mean[name], weight + 0.75)
        else:
            assert torch.equal(mean[name], weight)
    assert "tmp" not in (tmp_path / "mean" / "config.json").read_text()
    with pytest.raises(ValueError, match="add up to 1"):
        average([(tmp_path / "a", 0.5), (tmp_path / "b", 0.6)], tmp_path / "mean")
