"""LTX-2 against diffusers' own pipelines: whole videos with their sound, guidance, first frames, files."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import small_ltx2
from tests.families.meshes import AUTO, on_every_mesh

LONG, SHORT = "a red circle moving left on a black background", "blue"
SIZES = {"96x64x17": (LONG, 96, 64, 17), "64x64x9": (SHORT, 64, 64, 9)}
NEGATIVE = "left"
BLOCK = 1


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open(small_ltx2.directory(), RuntimeConfig(mesh=mesh))


def settings(pipeline: VideoPipeline, size: str, **changed: Any) -> Any:
    _, width, height, frames = SIZES[size]
    chosen = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": 2, "seed": 7}
    chosen |= {"negative_prompt": NEGATIVE, "max_sequence_length": small_ltx2.TEXT_TOKENS}
    return pipeline.settings(**(chosen | {"stg_scale": 1.0, "stg_block": BLOCK} | changed))


Made = tuple[torch.Tensor, torch.Tensor]


def made(pipeline: VideoPipeline, size: str, images: Any = (), **changed: Any) -> Made:
    """Frames, and the waveform of all videos."""
    chosen = settings(pipeline, size, **changed)
    latents = pipeline.denoise(pipeline.encode(SIZES[size][0], chosen, images), chosen)
    sound = pipeline.decode_sound(latents, chosen)
    assert sound is not None
    return torch.cat(list(pipeline.decode(latents, chosen)), dim=1), sound.samples


def by_diffusers(size: str, pipeline: Any = None, **changed: Any) -> Made:
    prompt, width, height, frames = SIZES[size]
    found = (pipeline or small_ltx2.reference())(
        **{
            "prompt": prompt,
            "negative_prompt": NEGATIVE,
            "height": height,
            "width": width,
            "num_frames": frames,
            "num_inference_steps": 2,
            "max_sequence_length": small_ltx2.TEXT_TOKENS,
            "spatio_temporal_guidance_blocks": [BLOCK],
            "generator": torch.Generator().manual_seed(7),
            "output_type": "pt",
            **changed,
        }
    )
    return found.frames.permute(0, 1, 3, 4, 2), found.audio


expected = functools.cache(by_diffusers)


def closeness(one: Made, other: Made) -> tuple[float, float]:
    """dB of the frames, and of the sound, which ends with the frames here."""
    count = min(one[1].shape[2], other[1].shape[2])
    return psnr(one[0], other[0]), psnr(one[1][..., :count], other[1][..., :count])


@on_every_mesh("size", SIZES)
def test_video_and_sound_are_those_of_diffusers_on_every_mesh(mesh: str, size: str) -> None:
    assert min(part.std() for part in expected(size)) > 0.05, "the reference shows and plays something"
    assert min(closeness(made(opened(mesh), size), expected(size))) >= SAME


@pytest.mark.slow
@pytest.mark.parametrize("mesh", AUTO["LTX-2"])
def test_the_video_on_what_auto_takes(mesh: str) -> None:
    assert min(closeness(made(opened(mesh), "64x64x9"), expected("64x64x9"))) >= SAME


BRANCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts": ({"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}, {"audio_guidance_scale": 2.0}),
    "perturbed": ({"stg_scale": 0.7, "modality_scale": 1.0}, {"audio_stg_scale": 1.4}),
    "isolated": ({"stg_scale": 0.0, "modality_scale": 2.5}, {"audio_modality_scale": 4.0}),
    "rescaled": ({"guidance_rescale": 0.3}, {"audio_guidance_rescale": 0.9}),
}
"""Scales of the video, and of the sound, whose others are the video's."""
_SAME_AS_VIDEO = ("audio_stg_scale", "audio_modality_scale", "audio_guidance_rescale")


@pytest.mark.slow
@pytest.mark.parametrize("branches", BRANCHES)
def test_each_branch_of_guidance(branches: str) -> None:
    of_video, of_sound = BRANCHES[branches]
    chosen = {"guidance_scale": 2.0, "audio_guidance_scale": 2.0} | of_video | of_sound
    same = dict.fromkeys(_SAME_AS_VIDEO)
    wanted = by_diffusers(
        "64x64x9", **{"stg_scale": 1.0, "modality_scale": 3.0, "guidance_rescale": 0.7} | same | chosen
    )
    found = made(opened("single"), "64x64x9", **chosen)
    assert min(closeness(found, wanted)) >= SAME
    assert max(closeness(found, expected("64x64x9"))) < SAME - 30, "which the comparison would see"


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 70, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("mesh", "size"), [("dp=2,tp=4", "64x64x9"), pytest.param("single", "96x64x17", marks=pytest.mark.slow)]
)
def test_a_video_from_a_first_frame_is_that_of_diffusers(mesh: str, size: str) -> None:
    wanted = by_diffusers(size, small_ltx2.image_reference(), image=picture())
    assert min(closeness(made(opened(mesh), size, [picture()]), wanted)) >= SAME
    assert max(closeness(wanted, expected(size))) < 60, "the image has an effect, also on the sound"
