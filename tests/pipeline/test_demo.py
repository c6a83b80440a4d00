"""The demo model through the whole pipeline: a prompt gives the video it asks for, on every mesh."""

import functools

import pytest
import torch

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline.test_video import psnr
from tools.demo_model.captions import Attributes
from tools.demo_model.clips import evaluation_prompts
from tools.demo_model.model import load
from tools.demo_model.score import see

PROMPT = "a red circle moving right on a black background"

# "A red circle moving left" is a triple that training never saw.
FIXED = [
    (PROMPT, Attributes("red", "circle", "right", "black")),
    ("a red circle moving left", Attributes("red", "circle", "left", None)),
    ("an orange square moving down on a black background", Attributes("orange", "square", "down", "black")),
    ("a cyan triangle standing still", Attributes("cyan", "triangle", "still", None)),
    ("a purple star growing on a white background", Attributes("purple", "star", "growing", "white")),
]


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open("demo", mesh=mesh)


@functools.cache
def video(prompt: str, mesh: str = "single", steps: int | None = None, reuse: float = 0.0) -> torch.Tensor:
    pipeline = opened(mesh)
    settings = pipeline.settings(seed=2025, num_inference_steps=steps, reuse=reuse)
    return torch.cat(list(pipeline.generate(prompt, settings)), dim=1)


@pytest.mark.parametrize(("prompt", "wanted"), FIXED, ids=[prompt for prompt, _ in FIXED])
def test_the_video_shows_what_was_asked_for(prompt: str, wanted: Attributes) -> None:
    seen = see(video(prompt)[0].numpy())
    assert seen.agrees(wanted) == dict.fromkeys(seen.agrees(wanted), True)


@pytest.mark.parametrize(("prompt", "wanted"), FIXED[:2], ids=[prompt for prompt, _ in FIXED[:2]])
def test_seven_of_twenty_steps_may_be_reused(prompt: str, wanted: Attributes) -> None:
    pipeline = opened("single")
    assert len(pipeline.plan(pipeline.settings(reuse=0.12)).reused) == 7
    reused = video(prompt, reuse=0.12)
    assert all(see(reused[0].numpy()).agrees(wanted).values())
    assert psnr(reused, video(prompt)) >= 25


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "sp=8"])
def test_every_mesh_gives_the_same_video(mesh: str) -> None:
    assert psnr(video(PROMPT, mesh, steps=5), video(PROMPT, steps=5)) >= 40


def test_diffusers_gives_the_same_video() -> None:
    settings = opened("single").settings(seed=2025)
    reference = load(DEMO_DIRECTORY, "cpu", torch.float32)
    reference.set_progress_bar_config(disable=True)
    frames = reference(
        PROMPT,
        height=settings.height,
        width=settings.width,
        num_frames=settings.num_frames,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        generator=torch.Generator().manual_seed(settings.seed),
        output_type="pt",
    ).frames
    assert reference.scheduler.config.flow_shift == settings.flow_shift
    assert psnr(video(PROMPT), frames.permute(0, 1, 3, 4, 2)) >= 40


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_prompts_of_which_training_never_saw_twenty_five() -> None:
    pipeline, right = opened("single"), {"colour": 0, "motion": 0, "shape": 0}
    for number, (prompt, wanted) in enumerate(evaluation_prompts(100, 25, 2025)):
        frames = torch.cat(list(pipeline.generate(prompt, pipeline.settings(seed=2025 + number))), dim=1)
        agreed = see(frames[0].numpy()).agrees(wanted)
        for name in right:
            right[name] += agreed[name]
    assert right["colour"] >= 97
    assert right["motion"] >= 95
    assert right["shape"] >= 90
