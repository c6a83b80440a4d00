"""Wan 2.2 Animate against diffusers' pipeline: one segment and several, a person moved and a person replaced."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import Frames
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import small_animate
from tests.families.meshes import MESHES
from tests.families.small_animate import given
from tests.families.small_vace import clip
from tests.pipeline.clips import picture, write_odd_videos
from tests.pipeline.test_video import PROMPT

CHOSEN: dict[str, Any] = {
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "flow_shift": 3.0,
    "seed": 7,
    "negative_prompt": "blue background",
    "max_sequence_length": 512,  # diffusers takes 512 tokens of text for granted where there are those of an image
}
SIZES = ((64, 96), (48, 80))
LENGTHS = {
    "one segment": {"num_frames": 7, "context_frames": 9, "context_overlap": 1},
    "two segments": {"num_frames": 15, "context_frames": 9, "context_overlap": 1},
    "an overlap of five": {"num_frames": 19, "context_frames": 13, "context_overlap": 5},
}


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open(small_animate.directory(), RuntimeConfig(mesh=mesh))


def settings(size: tuple[int, int], length: str, **changed: Any) -> GenerationSettings:
    height, width = size
    return opened("single").settings(**(CHOSEN | LENGTHS[length] | {"height": height, "width": width} | changed))


def make(mesh: str, chosen: GenerationSettings, media: GivenMedia) -> torch.Tensor:
    return torch.cat(list(opened(mesh).generate(PROMPT, chosen, media)), dim=1)


@functools.cache
def expected(replace: bool, size: tuple[int, int], length: str) -> torch.Tensor:
    chosen = {**CHOSEN, **LENGTHS[length], "prompt": PROMPT}
    return small_animate.run(chosen["num_frames"], replace, size, chosen)


@covering(
    "replace, mesh, size, length",
    (False, True),
    (*MESHES, "auto"),
    SIZES,
    tuple(LENGTHS),
    strength=0,
    always=[(True, "single", SIZES[1], "two segments")],
)
def test_the_video_is_that_of_diffusers(replace: bool, mesh: str, size: tuple[int, int], length: str) -> None:
    wanted = expected(replace, size, length)
    assert wanted.std() > 0.02
    made = make(mesh, settings(size, length), given(LENGTHS[length]["num_frames"], replace))
    assert psnr(made, wanted) >= SAME


@pytest.mark.slow
def test_the_comparison_would_see_another_request() -> None:
    size, length = SIZES[0], "two segments"
    count = LENGTHS[length]["num_frames"]
    right, chosen = given(count, True), settings(size, length)

    def made(**changed: np.ndarray) -> torch.Tensor:
        videos = {**right.videos, **{name: Frames(frames) for name, frames in changed.items()}}
        return make("single", chosen, dataclasses.replace(right, videos=videos))

    assert_wrong_ones_differ(
        expected(True, size, length),
        SAME - 10,
        pose=made(pose_video=clip(1, count)),
        face=made(face_video=clip(2, count, (30, 30))),
        background=made(background_video=clip(3, count)),
        mask=made(mask=np.full((count, 100, 150, 3), 255, np.uint8)),
        image=make("single", chosen, dataclasses.replace(right, images=(Image.fromarray(clip(4, 1)[0]),))),
        overlap=make("single", settings(size, length, context_overlap=5), right),
    )


@pytest.mark.thorough  # by default: the video of two segments, above
def test_several_segments_are_one_run_without_another_program() -> None:
    pipeline, chosen = opened("single"), settings(SIZES[1], "one segment", num_inference_steps=1)
    make("single", chosen, given(7, False))
    longer = dataclasses.replace(chosen, num_frames=15)
    reported: list[Progress] = []
    pipeline.on_progress = reported.append
    try:
        with count_compilations() as count:
            embeddings = pipeline.encode("a blue circle", longer, given(15, True))
            latents = pipeline.denoise(embeddings, longer)
            frames = torch.cat(list(pipeline.decode(latents, longer)), dim=1)
    finally:
        pipeline.on_progress = lambda progress: None
    assert count.requested == 0
    assert frames.shape == (1, 15, *SIZES[1], 3)
    steps = [(each.done, each.total) for each in reported if each.stage == "denoising"]
    assert steps[-1] == (2, 2)
    assert steps == sorted(steps)
    decoded = [(each.done, each.total) for each in reported if each.stage == "decoding"]
    assert decoded[-1][0] == decoded[-1][1] == 6
    assert decoded == sorted(decoded)


@pytest.mark.slow
def test_videos_of_a_batch_have_their_own_seeds() -> None:
    pipeline, chosen = opened("single"), settings(SIZES[1], "two segments", guidance_scale=1.0)
    embeddings = pipeline.encode(PROMPT, chosen, given(15, True))
    both = pipeline.denoise(embeddings, dataclasses.replace(chosen, num_videos=2), seeds=(3, 11))
    for row, seed in enumerate((3, 11)):
        alone = pipeline.denoise(embeddings, dataclasses.replace(chosen, seed=seed))
        assert torch.allclose(both[row], alone[0], atol=1e-4)


@pytest.mark.slow
def test_stages_hand_all_segments_on(tmp_path: Path) -> None:
    pipeline, chosen = opened("single"), settings(SIZES[1], "two segments")
    media = given(15, True)
    text = tmp_path / "text.safetensors"
    artifacts.save_text(text, pipeline.encode(PROMPT, chosen, media), chosen, pipeline)
    embeddings, header = artifacts.load_text(text, pipeline)
    latents = pipeline.denoise(embeddings, chosen)
    assert latents.shape == pipeline.latent_shape(chosen) == (1, 4, 6, 6, 10)
    frames = torch.cat(list(pipeline.decode(latents, chosen)), dim=1)
    assert torch.equal(frames, make("single", chosen, media))
    assert header.images_fingerprint == media.fingerprint
    of_latents = pipeline.latent_settings(latents, context_frames=9, context_overlap=1)
    assert of_latents.num_frames == 17, "of whole segments"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--pose-video", "clip.mp4", "--face-video", "clip.mp4"],
            "--image is missing: model {model} begins with an image; give one",
        ),
        (["--image", "person.png"], "--pose-video is missing: model {model} needs the poses"),
        (["--image", "person.png", "--pose-video", "clip.mp4"], "--face-video is missing: model {model} needs the"),
        (
            ["--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "short.mp4"],
            "--face-video has 4 frames and pose_video 9; give videos of the same length",
        ),
        (
            ["--image", "person.png", "--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"],
            "--image is given 2 times, but model {model} takes 1 at most; leave the others out",
        ),
        (
            [*("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4", "--mask", "clip.mp4")],
            "--mask is given without background_video; give background_video too, or leave mask out",
        ),
        (
            [
                *("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"),
                *("--background-video", "clip.mp4"),
            ],
            "--background-video is given without mask; give mask too, or leave background_video out",
        ),
        (
            [
                *("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"),
                *("--background-video", "clip.mp4", "--mask", "wide.png"),
            ],
            "--mask is 96×32 and background_video 64×48; give a mask of the same size",
        ),
        (
            [*("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"), "--video", "clip.mp4"],
            "--video is given, but model {model} takes",
        ),
        (
            ["--image", "person.png", "--pose-video", "song.mp4", "--face-video", "clip.mp4"],
            "--pose-video song.mp4 holds sound only; give a file with moving pictures",
        ),
        (
            ["--image", "person.png", "--pose-video", "empty.mkv", "--face-video", "clip.mp4"],
            "--pose-video empty.mkv has no frames; give another video",
        ),
        (
            ["--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4", "--num-frames", "30"],
            "--pose-video has 9 frames at 25 a second, and num_frames=30 are to be made; ask for 9 or fewer",
        ),
        (
            ["--image", "person.png", "--pose-video", "person.png", "--face-video", "clip.mp4"],
            "--pose-video has 1 frame at 25 a second, and num_frames=77 are to be made; ask for 1",
        ),
        (
            ["--image", "person.png", "--pose-video", "oblique.mp4", "--face-video", "clip.mp4"],
            "--pose-video oblique.mp4 is turned by its metadata, and not by a multiple of 90 degrees; convert it",
        ),
        (
            ["--image", "person.png", "--pose-video", "turned.mp4", "--face-video", "uneven.mp4"],
            "--face-video has 18 frames and pose_video 9; give videos of the same length",
        ),
        (
            ["--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "song.mp4"],
            "--face-video song.mp4 holds sound only; give a file with moving pictures",
        ),
        (
            ["--image", "person.png", *("--pose-video", "clip.mp4") * 2, "--face-video", "clip.mp4"],
            "--pose-video is given 2 times; give one",
        ),
        (
            [
                *("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"),
                *("--background-video", "short.mp4", "--mask", "short.mp4"),
            ],
            "--background-video has 4 frames and pose_video 9; give videos of the same length",
        ),
        (
            [
                *("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"),
                *("--background-video", "clip.mp4", "--mask", "turned.mp4"),
            ],
            "--mask is 48×64 and background_video 64×48; give a mask of the same size",
        ),
        (
            [
                *("--image", "person.png", "--pose-video", "clip.mp4", "--face-video", "clip.mp4"),
                *("--background-video", "clip.mp4", "--mask", "empty.mkv"),
            ],
            "--mask empty.mkv has no frames; give another video",
        ),
        (["--context", "static"], "--context static is windows, and this model makes a video segment by segment"),
        (["--context", "none"], "--context none makes a video at once, and this model makes it segment by segment"),
        (["--context-overlap", "2"], "--context-overlap 2 is no number of frames that two segments of this model"),
        (["--context-frames", "12"], "--context-frames 12 is not 4n+1 and over context_overlap=1; use 9 or 13"),
        (["--context-frames", "5", "--context-overlap", "5"], "--context-frames 5 is not 4n+1 and over"),
    ],
)
def test_what_is_refused_before_a_weight_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_odd_videos(tmp_path)
    picture(3, (96, 32)).save(tmp_path / "wide.png")
    picture(4, (48, 64)).save(tmp_path / "person.png")
    model = str(small_animate.directory())
    command = ["generate", PROMPT, "--model", model, "--mesh", "single", "--height", "48", "--width", "64"]
    monkeypatch.setattr("comfy_tpu.pipeline.running_model.RunningModel.weights", lambda *_: pytest.fail("loaded"))
    assert cli.main([*command, "--steps", "1", "--fps", "25", *arguments]) == 1
    assert message.format(model=model) in " ".join(capsys.readouterr().err.split())


def test_windows_of_another_model_are_not_segments() -> None:
    with pytest.raises(InvalidValueError, match="latents have 4 frames, which are no segments of 3"):
        opened("single").latent_settings(torch.zeros(1, 4, 4, 6, 10), context_frames=9)
