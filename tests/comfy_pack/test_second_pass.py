"""A second pass by two samplers is that of the command line. Needs no ComfyUI."""

import pytest

from tests.comfy_pack.loading import run_script


@pytest.fixture(scope="module")
def outcomes():
    return run_script("run_second_pass.py")


@pytest.mark.parametrize("kind", ["video", "image"])
def test_latents_of_another_size_are_resized_and_redrawn(outcomes, kind):
    found = outcomes[kind]
    assert found["difference"] < 1e-5
    assert min(found["another strength"], found["without latents"]) > 0.1


def test_tpu_options_choose_tiles(outcomes):
    assert outcomes["image"]["by tiles"] < 1e-5
    assert outcomes["image"]["whole"] > 0.01


def test_each_latent_is_one_result(outcomes):
    assert outcomes["image"]["the first of two"] < 1e-5


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("frames", "initial_latents have 5 frames, and 17 frames of video at 24 a second have 3 with 5 more for the"),
        ("another model", "those of another model; connect latents of this one"),
        ("fps", "initial_latents were made at 24 frames a second, and their sound is as long; set fps to that"),
        ("no sound", "initial_latents have 2 frames, and 9 frames of video at 24 a second have 2 with 3 more for the"),
        (
            "noise mask",
            "initial_latents come with a noise_mask, from Set Latent Noise Mask or VAE Encode (for Inpainting)",
        ),
        ("no number", "the latents to start from hold NaN or infinity"),
        ("no latents", "initial_latents is not a LATENT; connect a sampler or a VAE Encode"),
        ("strength", "strength=0.1 leaves none of 4 steps; use 0.25 or more"),
        ("numbers", "initial_latents hold 2 videos, and TPU Options ask for 3; leave num_videos at 1"),
    ],
)
def test_wrong_latents_are_refused(outcomes, case, sentence):
    assert sentence in outcomes["video"]["refused"][case]
