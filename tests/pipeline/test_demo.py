"""The demo model through the whole pipeline: a prompt gives the video it asks for. Meshes are in test_layouts.py."""

import functools

import pytest
import torch

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tools.demo_model.captions import Attributes
from tools.demo_model.clips import evaluation_prompts
from tools.demo_model.model import load
from tools.demo_model.score import observe

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
def opened() -> VideoPipeline:
    return VideoPipeline.open("demo", RuntimeConfig(mesh="single"))


@functools.cache
def video(prompt: str, reuse: float = 0.0, steps: int | None = None) -> torch.Tensor:
    pipeline = opened()
    settings = pipeline.settings(seed=2025, reuse=reuse, num_inference_steps=steps)
    return torch.cat(list(pipeline.generate(prompt, settings)), dim=1)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        pytest.param(*case, id=case[0], marks=[] if number == 0 else [pytest.mark.slow])
        for number, case in enumerate(FIXED)
    ],
)
def test_the_video_shows_what_was_asked_for(prompt: str, wanted: Attributes) -> None:
    seen = observe(video(prompt)[0].numpy())
    assert seen.agrees(wanted) == dict.fromkeys(seen.agrees(wanted), True)


@pytest.mark.slow  # which steps are reused: tests/pipeline/test_reuse.py
@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [pytest.param(*FIXED[0], id=FIXED[0][0]), pytest.param(*FIXED[1], id=FIXED[1][0], marks=pytest.mark.slow)],
)
def test_seven_of_twenty_steps_may_be_reused(prompt: str, wanted: Attributes) -> None:
    pipeline = opened()
    assert len(pipeline.plan(pipeline.settings(reuse=0.12)).reused) == 7
    reused = video(prompt, reuse=0.12)
    assert all(observe(reused[0].numpy()).agrees(wanted).values())
    assert psnr(reused, video(prompt)) >= 35, "39 and 51 are found"
    assert_wrong_ones_differ(video(prompt), 25, **{other: video(other) for other, _ in FIXED[:2] if other != prompt})


@pytest.mark.thorough  # by default: a small model's, test_video.py
def test_diffusers_gives_the_same_video() -> None:
    settings = opened().settings(seed=2025, num_inference_steps=5)
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
    assert psnr(video(PROMPT, steps=5), frames.permute(0, 1, 3, 4, 2)) >= SAME


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_prompts_of_which_training_never_saw_twenty_five() -> None:
    pipeline, right = opened(), {"colour": 0, "motion": 0, "shape": 0}
    for number, (prompt, wanted) in enumerate(evaluation_prompts(100, 25, 2025)):
        frames = torch.cat(list(pipeline.generate(prompt, pipeline.settings(seed=2025 + number))), dim=1)
        agreed = observe(frames[0].numpy()).agrees(wanted)
        for name in right:
            right[name] += agreed[name]
    assert right["colour"] >= 97
    assert right["motion"] >= 95
    assert right["shape"] >= 90
