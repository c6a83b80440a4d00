"""Videos from an image that are continued segment by segment, and image-to-video by windows."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.context import settle_context
from comfy_tpu.pipeline.images import as_image
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import wan_pipelines
from tests.families.wan_pipelines import picture
from tests.pipeline import small_pipeline

PROMPT = "a red circle moving left"
CHOSEN: dict[str, Any] = {
    "height": 32,
    "width": 64,
    "num_frames": 21,  # segments of 9 frames: 9, 8 more, and 4 more
    "num_inference_steps": 2,
    "guidance_scale": 4.0,
    "flow_shift": 3.0,
    "seed": 7,
    "context_frames": 9,
}


@functools.cache
def opened(kind: str, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(wan_pipelines.directory(kind), RuntimeConfig(mesh=mesh))


def settings(kind: str, **changed: Any) -> GenerationSettings:
    own = {} if kind.startswith("2.1") else {"max_sequence_length": 32}
    return opened(kind).settings(**(CHOSEN | own | changed))


def frames(pipeline: VideoPipeline, made: GenerationSettings, *images: Image.Image) -> torch.Tensor:
    return torch.cat(list(pipeline.generate(PROMPT, made, images)), dim=1)


def test_a_continued_video_is_that_of_its_segments() -> None:
    """The 5B, whose first latent is that of the image itself: decoding it again changes nothing."""
    pipeline = opened("5B image")
    image, expected = picture(0), torch.empty(0)
    for number in range(3):
        segment = settings("5B image", num_frames=9, seed=7 + number)
        made = frames(pipeline, segment, image)
        expected = torch.cat((expected, made[:, 1:]), dim=1) if number else made
        image = as_image(made[0, -1])
    continued = frames(pipeline, settings("5B image"), picture(0))
    assert continued.shape[1] == 21
    assert torch.equal(continued, expected[:, :21])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2.1 image", "2.2 image"])
def test_every_segment_begins_with_the_last_frame_of_the_one_before(kind: str) -> None:
    pipeline, whole = opened(kind), settings(kind)
    settled = pipeline.settle_context(whole, [picture(0)])
    latents = pipeline.denoise(pipeline.encode(PROMPT, whole, [picture(0)]), whole)
    assert latents.shape == pipeline.latent_shape(whole)
    own = dataclasses.replace(whole, num_frames=9, context="none")
    first = pipeline.denoise(pipeline.encode(PROMPT, own, [picture(0)]), own)
    assert torch.equal(latents[:, :, :3], first)
    *_, last = pipeline.decode(first, own)
    image = as_image(last[0, -1])
    later = dataclasses.replace(own, seed=8)
    second = pipeline.denoise(pipeline.encode(PROMPT, later, [image]), later)
    assert torch.equal(latents[:, :, 3:5], second[:, :, 1:])
    # Decoded as it was made: behind the image's own latent.
    given = torch.cat((pipeline.encode_first_frame(image, own), second[:, :, 1:]), dim=2)
    shown = torch.cat(list(pipeline.decode(given, own)), dim=1)[:, 1:]
    assert torch.equal(torch.cat(list(pipeline.decode(latents, settled)), dim=1)[:, 9:17], shown)


@pytest.mark.slow
def test_several_videos_go_on_from_their_own_frames() -> None:
    pipeline, both = opened("2.1 image"), settings("2.1 image", num_videos=2, num_frames=17)
    made = pipeline.denoise(pipeline.encode(PROMPT, both, [picture(0)]), both, seeds=(7, 20))
    for row, seed in enumerate((7, 20)):
        alone = settings("2.1 image", num_frames=17, seed=seed)
        expected = pipeline.denoise(pipeline.encode(PROMPT, alone, [picture(0)]), alone)
        # The frame that is gone on from is rounded to bytes: last bits of a batch may move it.
        assert psnr(made[row : row + 1], expected) >= 60


@pytest.mark.slow
def test_a_mesh_gives_the_video_of_one_device() -> None:
    made, image = settings("5B image"), picture(0)
    assert psnr(frames(opened("5B image", "dp=2,sp=4"), made, image), frames(opened("5B image"), made, image)) >= 60


@pytest.mark.thorough  # by default: windows, test_windows.py
def test_progress_counts_all_segments_and_no_length_compiles_another_step() -> None:
    pipeline = opened("5B image")
    frames(pipeline, settings("5B image"), picture(0))
    before = pipeline.on_progress
    events: list[Progress] = []
    pipeline.on_progress = events.append
    with count_compilations() as count:
        frames(pipeline, settings("5B image", num_frames=33), picture(0))
    assert count.requested == 0
    steps = [(each.done, each.total) for each in events if each.stage == "denoising"]
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert {total for _, total in steps} == {8}
    assert steps[-1] == (8, 8)
    decoded = [(each.done, each.total) for each in events if each.stage == "decoding"]
    assert decoded == sorted(decoded)
    assert decoded[-1] == (3 + 3 + 3 + 3, 12)
    assert pipeline.on_progress == events.append
    pipeline.on_progress = before


@pytest.mark.thorough  # by default: windows, test_windows.py, and a continued video, below
def test_windows_have_their_own_frames_of_the_image() -> None:
    """Against a plain loop with diffusers' transformer: mask and latents of the image are channels of the first window
    only, and CLIP's tokens are in all."""
    kind, made = "2.1 image", settings("2.1 image", context="static", context_overlap=4, guidance_scale=1.0)
    pipeline = opened(kind)
    embeddings = pipeline.encode(PROMPT, made, [picture(0)])
    condition = embeddings.shared["condition"]
    assert condition.shape[2] == 6
    reference = wan_pipelines.reference(kind)
    scheduler = pipeline.files.scheduler(made)
    from comfy_tpu.pipeline.noise import initial_noise

    latents = initial_noise(pipeline.latent_shape(made), made.seed)
    for timestep in scheduler.timesteps:
        total, weight = torch.zeros_like(latents), torch.zeros(6)
        ramp = torch.tensor([1.0, 2.0, 1.0])
        for start in (0, 2, 3):
            place = slice(start, start + 3)
            channels = torch.cat((latents[:, :, place], condition[:, :, place]), dim=1)
            with torch.no_grad():
                velocity = reference.transformer(
                    channels,
                    timestep.expand(1),
                    embeddings.positive["text"],
                    embeddings.shared["image"],
                    return_dict=False,
                )[0]
            total[:, :, place] += velocity * ramp.view(-1, 1, 1)
            weight[place] += ramp
        latents = scheduler.step(total / weight.view(-1, 1, 1), timestep, latents, return_dict=False)[0]
    assert psnr(pipeline.denoise(embeddings, made), latents) >= SAME


@pytest.mark.parametrize(
    ("kind", "images", "changed", "text"),
    [
        (
            "5B image",
            1,
            {"context": "static"},
            "context=static is windows, and .* keeps a first frame in all of them; choose continue",
        ),
        ("5B", 0, {"context": "continue"}, "context=continue goes on from an image, and .* was given none; give one"),
        ("2.2 image", 2, {}, "last_image cannot be reached by a video of 21 frames that is continued every 9; choose"),
    ],
)
def test_refused_before_weights_are_loaded(kind: str, images: int, changed: dict[str, Any], text: str) -> None:
    pipeline = VideoPipeline.open(wan_pipelines.directory(kind), RuntimeConfig(mesh="single"))
    loaded: list[str] = []
    pipeline.on_progress = lambda progress: loaded.append(progress.stage)
    with pytest.raises(InvalidValueError, match=text):
        pipeline.encode(PROMPT, settings(kind, **changed), [picture(seed) for seed in range(images)])
    assert "loading" not in loaded


def test_a_model_without_images_is_not_continued() -> None:
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    made = pipeline.settings(num_frames=125, context="continue")
    with pytest.raises(InvalidValueError, match="context=continue goes on from an image, and .* takes none; choose"):
        pipeline.encode(PROMPT, made)


def test_a_first_and_a_last_image_are_windows() -> None:
    made = settings("2.1 first and last")
    assert settle_context(opened("2.1 first and last").family.card, made, [1, 2]) == made
