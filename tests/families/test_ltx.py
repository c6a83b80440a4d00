"""LTX-Video against diffusers' own pipelines: whole videos, masks, shifts, frame rates, the VAE, full size."""

import functools
from typing import Any

import pytest
import torch

from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_ltx

LONG, SHORT = "a red circle moving left on a black background", "blue"
SIZES = {"96x64x17": (LONG, 96, 64, 17), "64x32x9": (SHORT, 64, 32, 9)}
MESHES = ["single", "dp=2,tp=4", "dp=2,sp=4"]
NEGATIVE = "left"


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float(-10 * torch.log10(((one - other) ** 2).mean().clamp_min(1e-20)))


@functools.cache
def opened(mesh: str, *, conditioned: bool = False) -> VideoPipeline:
    return VideoPipeline.open(small_ltx.directory(conditioned=conditioned), mesh=mesh)


def settings(pipeline: VideoPipeline, size: str, **changed: Any) -> Any:
    _, width, height, frames = SIZES[size]
    chosen = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": 3, "seed": 7}
    chosen |= {"negative_prompt": NEGATIVE, "max_sequence_length": small_ltx.TEXT_TOKENS}
    return pipeline.settings(**(chosen | changed))


def video(pipeline: VideoPipeline, size: str, prompt: str | None = None, images: Any = (), **changed: Any) -> Any:
    frames = pipeline.generate(prompt or SIZES[size][0], settings(pipeline, size, **changed), images)
    return torch.cat(list(frames), dim=1)


def by_diffusers(size: str, pipeline: Any = None, **changed: Any) -> torch.Tensor:
    prompt, width, height, frames = SIZES[size]
    made = (pipeline or small_ltx.reference())(
        **{
            "prompt": prompt,
            "negative_prompt": NEGATIVE,
            "height": height,
            "width": width,
            "num_frames": frames,
            "num_inference_steps": 3,
            "max_sequence_length": small_ltx.TEXT_TOKENS,
            "generator": torch.Generator().manual_seed(7),
            "output_type": "pt",
            **changed,
        }
    ).frames
    return made.permute(0, 1, 3, 4, 2)


expected = functools.cache(by_diffusers)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_video_is_that_of_diffusers_on_every_mesh(mesh: str, size: str) -> None:
    assert expected(size).std() > 0.05, "the reference shows something"
    assert psnr(video(opened(mesh), size), expected(size)) >= 40
