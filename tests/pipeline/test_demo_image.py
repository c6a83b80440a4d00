"""The demo model that begins with an image: it keeps the image, and does with it what the prompt says."""

import functools

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tools.demo_model import evaluate_image
from tools.demo_model.evaluate_image import PSNR_MIN, Task, first_frame_psnr
from tools.demo_model.model import load_image_model
from tools.demo_model.score import observe

MODEL = "demo-image"


@functools.cache
def opened(mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(MODEL, RuntimeConfig(mesh=mesh))


@functools.cache
def tasks() -> list[Task]:
    """Fifty, of which twelve are of triples that training never saw."""
    return evaluate_image.tasks(50, 12, 2025)


def continued(number: int, mesh: str = "single", steps: int | None = None) -> np.ndarray:
    task, pipeline = tasks()[number], opened(mesh)
    settings = pipeline.settings(seed=2025 + number, num_inference_steps=steps)
    return torch.cat(list(pipeline.generate(task.prompt, settings, [task.image])), dim=1)[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 49))])
def test_the_image_is_kept_and_does_what_the_prompt_says(number: int) -> None:
    task, video = tasks()[number], continued(number, steps=8)
    assert first_frame_psnr(task.image, video) >= PSNR_MIN
    seen = observe(video)
    assert (seen.motion, seen.colour, seen.background) == (
        task.wanted.motion,
        task.wanted.colour,
        task.wanted.background,
    )


@pytest.mark.slow
def test_one_image_obeys_two_prompts() -> None:
    pipeline, image = opened(), tasks()[2].image
    settings = pipeline.settings(seed=7, num_inference_steps=8)
    for motion, words in (("left", "moving left"), ("right", "moving right")):
        parts = pipeline.generate(f"a purple star {words}", settings, [image])
        assert observe(torch.cat(list(parts), dim=1)[0].numpy()).motion == motion


@pytest.mark.slow  # such models over meshes: tests/families/test_wan.py, against diffusers
def test_a_mesh_gives_the_same_video() -> None:
    alone, shared = (torch.from_numpy(continued(0, mesh, steps=2)) for mesh in ("single", "dp=2,tp=4"))
    assert psnr(shared, alone) >= SAME, "133 are found"


@pytest.mark.slow  # by default: the demo model in test_demo.py, images in tests/families
def test_diffusers_gives_the_same_video() -> None:
    reference = load_image_model(DEMO_DIRECTORIES[MODEL])
    expected = evaluate_image.generate(reference, tasks()[:1], steps=4, guidance=3.0, seed=2025)
    assert psnr(torch.from_numpy(continued(0, steps=4)), torch.from_numpy(expected[0])) >= SAME, "132 are found"


@pytest.mark.slow  # by default: tests/test_facade.py
def test_an_image_of_another_size_and_mode_is_brought_to_size() -> None:
    image = tasks()[2].image.convert("RGBA").resize((200, 100), Image.Resampling.NEAREST)
    pipeline = opened()
    settings = pipeline.settings(seed=7, num_inference_steps=4)
    video = torch.cat(list(pipeline.generate("a purple star growing", settings, [image])), dim=1)
    assert video.shape == (1, 17, 64, 64, 3)


def test_it_needs_an_image_and_the_other_takes_none() -> None:
    with pytest.raises(InvalidValueError, match="image is missing: model demo-image begins with an image"):
        opened().encode("a star", opened().settings())
    plain = VideoPipeline.open("demo")
    with pytest.raises(InvalidValueError, match="such as demo-image"):
        plain.encode("a star", plain.settings(), [tasks()[0].image])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_images_are_kept_and_forty_eight_prompts_followed() -> None:
    followed = 0
    for number, task in enumerate(tasks()):
        video = continued(number)
        assert first_frame_psnr(task.image, video) >= PSNR_MIN
        followed += observe(video).motion == task.wanted.motion
    assert followed >= 48, "49 are found: all but a spinning square"
