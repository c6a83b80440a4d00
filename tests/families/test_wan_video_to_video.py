"""Wan from a video against diffusers' pipeline, and what is refused of a given video."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanVideoToVideoPipeline
from PIL import Image

from comfy_tpu.cli import main as cli
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.initial import first_step
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import Frames
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.families.meshes import MESHES
from tests.pipeline import small_pipeline
from tests.pipeline.clips import write_images, write_video
from tests.pipeline.test_video import PROMPT

CHOSEN: dict[str, Any] = {
    "num_frames": 9,
    "num_inference_steps": 5,
    "guidance_scale": 4.0,
    "flow_shift": 3.0,
    "seed": 7,
    "negative_prompt": "blue background",
    "max_sequence_length": 32,
}
SIZES = ((64, 96), (48, 80))


def clip(seed: int = 0, frames: int = 9, size: tuple[int, int] = (70, 50)) -> np.ndarray:
    """Blurred noise, of another size than any result here."""
    drawn = np.random.default_rng(seed).integers(0, 255, (frames, 5, 7, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(each).resize(size, Image.Resampling.BICUBIC)) for each in drawn])


@functools.cache
def opened(mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh=mesh))


@functools.cache
def expected(height: int, width: int, strength: float) -> torch.Tensor:
    known = small_pipeline.reference()
    parts = {name: getattr(known, name) for name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")}
    pipeline = WanVideoToVideoPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        video=[Image.fromarray(frame) for frame in clip()],
        prompt=PROMPT,
        negative_prompt=CHOSEN["negative_prompt"],
        height=height,
        width=width,
        num_inference_steps=CHOSEN["num_inference_steps"],
        guidance_scale=CHOSEN["guidance_scale"],
        strength=strength,
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
        max_sequence_length=CHOSEN["max_sequence_length"],
    ).frames.permute(0, 1, 3, 4, 2)


def video(
    mesh: str, height: int, width: int, strength: float | None, frames: np.ndarray | None = None, **changed: Any
) -> torch.Tensor:
    pipeline = opened(mesh)
    settings = pipeline.settings(**CHOSEN | {"height": height, "width": width} | changed)
    given = GivenMedia(videos={"video": Frames(clip() if frames is None else frames)}, strength=strength)
    return torch.cat(list(pipeline.generate(PROMPT, settings, given)), dim=1)


@pytest.mark.parametrize(
    ("mesh", "size", "strength"),
    [
        ("single", SIZES[0], 0.7),
        *(
            pytest.param(mesh, size, strength, marks=pytest.mark.slow)
            for mesh in (*MESHES, "auto")
            for size in SIZES
            for strength in (0.7, 0.3, 1.0)
            if (mesh, size, strength) != ("single", SIZES[0], 0.7)
        ),
    ],
)
def test_the_video_is_that_of_diffusers(mesh: str, size: tuple[int, int], strength: float) -> None:
    wanted = expected(*size, strength)
    assert wanted.std() > 0.02
    assert psnr(video(mesh, *size, strength), wanted) >= SAME


@pytest.mark.slow
def test_the_comparison_would_see_another_request() -> None:
    size = SIZES[0]
    assert_wrong_ones_differ(
        expected(*size, 0.7),
        85,
        strength=video("single", *size, 0.9),
        clip=video("single", *size, 0.7, clip(1)),
        seed=video("single", *size, 0.7, seed=8),
    )


@pytest.mark.parametrize(("count", "strength", "first"), [(10, 0.7, 3), (5, 0.3, 4), (50, 0.8, 10), (4, 1.0, 0)])
def test_the_first_step_is_that_of_diffusers(count: int, strength: float, first: int) -> None:
    pipeline = opened()
    assert first_step(pipeline.family.card, count, strength) == first
    settings = pipeline.settings(**CHOSEN | {"num_inference_steps": count})
    assert len(pipeline.plan(settings, strength)) == count - first


@pytest.mark.slow
def test_stages_rows_and_files_hand_the_video_on(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "clip.mp4", range(0, 480, 40))
    model = ["--model", str(small_pipeline.directory()), "--mesh", "single"]
    chosen = ["--height", "48", "--width", "64", "--steps", "3", "--fps", "25", "--video", "clip.mp4"]
    command = ["generate", PROMPT, *model, *chosen, "--strength", "0.7", "-o", "whole.npy"]
    assert cli.main(command) == 0
    whole = np.load("whole.npy")
    assert len(whole) == 9, "twelve frames of the clip, rounded to 4n+1"
    assert cli.main(["encode", PROMPT, *model, *chosen, "--strength", "0.7"]) == 0
    assert cli.main(["denoise", "text.safetensors", "--mesh", "single"]) == 0
    assert cli.main(["decode", "latents.safetensors", "-o", "staged.npy", "--mesh", "single"]) == 0
    assert np.array_equal(np.load("staged.npy"), whole)
    capsys.readouterr()
    # Another clip under the same name makes the stage stale, the same one does not.
    assert cli.main(["encode", PROMPT, *model, *chosen, "--strength", "0.7"]) == 0
    assert "is there already" in capsys.readouterr().err
    write_video(tmp_path / "clip.mp4", range(0, 480, 40), first=1)
    assert cli.main(["encode", PROMPT, *model, *chosen, "--strength", "0.7"]) == 0
    assert "is there already" not in capsys.readouterr().err
    assert cli.main([*command[:-1], "whole.mp4"]) == 0
    metadata = media.read_metadata("whole.mp4")
    assert (metadata["strength"], len(metadata["pictures"])) == ("0.7", 16)


def _clip(directory: Path, count: int = 9, **options: Any) -> Path:
    return write_video(directory / "clip.mp4", range(0, 40 * count, 40), **options)


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (_clip, ["--num-frames", "13"], "--video has 9 frames at 25 a second, and num_frames=13 are to be made"),
        (_clip, ["--video", "clip.mp4"], "--video is given 2 times; give one"),
        (_clip, ["--mask", "clip.mp4"], "--mask is given, but model {model} takes video; leave it out"),
        (
            _clip,
            ["--reference", "x/frame_000.png"],
            "--reference is given, but model {model} takes no reference images",
        ),
        (_clip, ["--image", "x/frame_000.png"], "--image is given, but model {model} begins with a prompt alone"),
        (_clip, ["--strength", "0"], "--strength 0.0 is not a number over 0, up to 1"),
        (_clip, ["--strength", "0.1"], "--strength 0.1 leaves none of 3 steps; use 0.334 or more"),
        (_clip, ["--control-strength", "1"], "--control-strength is given, but model {model} reads no control"),
        (_clip, ["--control-strength", "a,b"], "--control-strength a,b is neither a number nor numbers with commas"),
        (
            lambda directory: write_video(directory / "clip.mp4", [], sound=True),
            [],
            "--video clip.mp4 holds sound only; give a file with moving pictures",
        ),
        (
            lambda directory: (directory / "clip.mp4").write_bytes(b"no video"),
            [],
            "--video clip.mp4 cannot be read as a video",
        ),
        (lambda directory: None, [], "--video clip.mp4 is not a file; give a video such as clip.mp4"),
    ],
)
def test_what_is_refused_before_a_weight_is_loaded(
    make: Any, more: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    write_images(tmp_path / "x", 1)
    model = str(small_pipeline.directory())
    command = ["generate", PROMPT, "--model", model, "--mesh", "single", "--height", "48", "--width", "64"]
    monkeypatch.setattr("comfy_tpu.pipeline.running_model.RunningModel.weights", lambda *_: pytest.fail("loaded"))
    assert cli.main([*command, "--steps", "3", "--fps", "25", "--video", "clip.mp4", *more]) == 1
    assert message.format(model=model) in " ".join(capsys.readouterr().err.split())


def test_a_video_is_cut_and_stretched_with_a_warning(caplog: Any) -> None:
    pipeline = opened()
    settings = pipeline.settings(**CHOSEN | {"height": 64, "width": 64})
    given = GivenMedia(videos={"video": Frames(clip(frames=20, size=(96, 48)))})
    fitted = pipeline._fit(given, settings).videos["video"]
    assert tuple(fitted.shape) == (9, 64, 64, 3)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "video is 96×48 and is stretched to 64×64; ask for width=96 and height=48, or crop it",
        "video has 20 frames at 16 a second; the first 9 are used",
    ]


def test_latents_of_another_size_are_refused_by_the_next_stage() -> None:
    pipeline = opened()
    settings = pipeline.settings(**CHOSEN | {"height": 64, "width": 96})
    embeddings = pipeline.encode_text(PROMPT, settings)
    shared = {"initial": torch.zeros(1, 4, 3, 6, 6), "strength": torch.tensor([[0.5]])}
    for given, message in (
        (shared, "what to start from was made for other sizes: its latents have shape"),
        ({"initial": shared["initial"]}, "embeddings to start from have no strength"),
        ({**shared, "initial": torch.full((1, 4, 3, 8, 12), torch.nan)}, "latents to start from hold NaN or infinity"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            pipeline.denoise(type(embeddings)(PROMPT, embeddings.positive, embeddings.negative, shared=given), settings)
