"""comfy_tpu.open and what it returns, with a small random model and with the demo model's own checks elsewhere."""

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import comfy_tpu
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import AttentionConfig, ResidencyConfig, RuntimeConfig, SecondPass
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.facade import Settings, Video
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.second_pass import denoise_again
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline import small_loras, small_pipeline

SIZE: dict[str, Any] = {
    "height": 32,
    "width": 48,
    "num_frames": 5,
    "num_inference_steps": 2,
    "max_sequence_length": 16,
}
PROMPT = "a red circle moving left"


@pytest.fixture(scope="module")
def pipe() -> Iterator[comfy_tpu.Pipeline]:
    with comfy_tpu.open(small_pipeline.directory(), comfy_tpu.RuntimeConfig(mesh="single")) as opened:
        yield opened


@pytest.fixture(scope="module")
def video(pipe: comfy_tpu.Pipeline) -> Video:
    return pipe(PROMPT, seed=7, **SIZE)


def test_importing_loads_neither_jax_nor_torch() -> None:
    code = "import sys, comfy_tpu; dir(comfy_tpu); sys.exit(bool({'jax', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(comfy_tpu, name) is not None for name in comfy_tpu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        getattr(comfy_tpu, "opne")  # noqa: B009


def test_settings_are_those_of_the_pipeline() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(comfy_tpu.GenerationSettings)}
    assert {name: str(kind) for name, kind in fields.items()} == {
        name: kind.__forward_arg__ for name, kind in Settings.__annotations__.items()
    }


def test_a_call_makes_what_the_stages_make(pipe: comfy_tpu.Pipeline, video: Video) -> None:
    stages = pipe.stages
    settings = stages.settings(seed=7, **SIZE)
    expected = torch.cat(list(stages.generate(PROMPT, settings)), dim=1)[0]
    assert video.settings == settings
    assert np.array_equal(video.numpy(), expected.mul(255).round().clamp(0, 255).byte().numpy())
    assert len(video) == len(video.images()) == 5


@pytest.mark.parametrize("name", ["x.mp4", "x.gif", "x.npy", "frames/"])
def test_saving(name: str, video: Video, tmp_path: Path) -> None:
    target = tmp_path / name
    if name.endswith("/"):
        target.mkdir()
    written = video.save(target)
    assert media.read_metadata(written).get("prompt", PROMPT) == PROMPT
    if name == "x.npy":
        assert np.array_equal(np.load(written), video.frames)


@pytest.mark.thorough  # by default: a call of one
def test_several_prompts_and_videos(pipe: comfy_tpu.Pipeline, video: Video) -> None:
    first, second = pipe([PROMPT, "a blue square"], seed=7, **SIZE)
    assert np.array_equal(first.frames, video.frames)
    assert not np.array_equal(second.frames, video.frames)
    both: Any = pipe(PROMPT, seed=7, num_videos=2, **SIZE)
    assert [each.metadata["video"] for each in both] == ["0", "1"]
    with pytest.raises(InvalidValueError, match="prompt is an empty list"):
        pipe([])
    for prompt, kind in ((7, "int"), (None, "NoneType"), ([PROMPT, 7], "int")):
        with pytest.raises(InvalidValueError, match=f"prompt is a {kind}, expected text or a list of texts"):
            # Before the first video of a list is made.
            pipe(prompt, on_progress=lambda progress: pytest.fail("it has begun"), **SIZE)


def test_numbers_of_numpy(pipe: comfy_tpu.Pipeline, video: Video) -> None:
    chosen: dict[str, Any] = {name: np.int64(value) for name, value in SIZE.items()}
    assert np.array_equal(pipe(PROMPT, seed=np.int32(7), **chosen).frames, video.frames)  # type: ignore[typeddict-item]


def test_a_lora_is_of_one_call(pipe: comfy_tpu.Pipeline, video: Video, tmp_path: Path) -> None:
    path = small_loras.write(tmp_path / "a.safetensors", small_loras.diffusers_style())
    with_lora, with_half = pipe(PROMPT, seed=7, lora=path, **SIZE), pipe(PROMPT, seed=7, lora=[(path, 0.5)], **SIZE)
    assert not np.array_equal(with_lora.frames, video.frames)
    assert not np.array_equal(with_lora.frames, with_half.frames)
    assert np.array_equal(pipe(PROMPT, seed=7, **SIZE).frames, video.frames)


def test_a_preset_is_of_one_call(pipe: comfy_tpu.Pipeline, video: Video, caplog: pytest.LogCaptureFixture) -> None:
    assert pipe.presets["4step"]["num_inference_steps"] == 4
    sizes: dict[str, Any] = {name: value for name, value in SIZE.items() if name != "num_inference_steps"}
    few = pipe(PROMPT, seed=7, preset="4step", guidance_scale=1.5, **sizes)
    assert (few.settings.num_inference_steps, few.settings.scheduler) == (4, "euler-trailing")
    assert few.settings.guidance_scale == 1.5, "what is given goes before it"
    assert few.metadata["preset"] == "4step"
    assert "preset=4step is for a model or a LoRA that was distilled for it" in caplog.text
    again = pipe(PROMPT, seed=7, **SIZE)
    assert np.array_equal(again.numpy(), video.numpy())
    with pytest.raises(InvalidValueError, match="preset=9step is unknown"):
        pipe(PROMPT, preset="9step")


def test_a_second_pass_is_that_of_the_stages(pipe: comfy_tpu.Pipeline, video: Video, tmp_path: Path) -> None:
    stages, first = pipe.stages, video.settings
    embeddings = stages.encode(PROMPT, first)
    second = SecondPass(2.0, strength=0.5, by="pixels")
    latents, larger = denoise_again(stages, embeddings, stages.denoise(embeddings, first), first, second)
    expected = torch.cat(list(stages.decode(latents, larger)), dim=1)[0]

    saved = tmp_path / "steps.safetensors"
    made = pipe(PROMPT, seed=7, upscale=np.float64(2), upscale_by="pixels", checkpoint=saved, **SIZE)
    assert made.frames.shape == (5, 64, 96, 3)
    assert made.settings == larger
    assert np.array_equal(made.frames, expected.mul(255).round().clamp(0, 255).byte().numpy())
    assert json.loads(made.metadata["second_pass"]) == {
        "scale": 2.0,
        "strength": 0.5,
        "steps": 0,
        "by": "pixels",
        "from": "48x32",
        "from_steps": 2,
    }
    assert not list(tmp_path.iterdir()), "both files of saved steps are removed at the end"
    streamed = asyncio.run(_read_all(pipe.stream(PROMPT, seed=7, upscale=2, upscale_by="pixels", **SIZE)))
    assert np.array_equal(np.stack(streamed), made.frames)


async def _read_all(frames: AsyncIterator[np.ndarray]) -> list[np.ndarray]:
    return [frame async for frame in frames]


def test_an_interrupted_second_pass_goes_on(
    pipe: comfy_tpu.Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: dict[str, Any] = {**SIZE, "seed": 7, "upscale": 2, "upscale_steps": 4}
    whole = pipe(PROMPT, **chosen)
    saved = tmp_path / "x.checkpoint.safetensors"
    denoised: list[tuple[int, int]] = []

    def stop(progress: comfy_tpu.Progress) -> None:
        if progress.stage == "denoising":
            denoised.append((progress.done, progress.total))
            if len(denoised) > 3 and progress.done == 2:  # of the second pass
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(PROMPT, checkpoint=saved, on_progress=stop, **chosen)
    assert {path.name for path in tmp_path.iterdir()} == {
        "x.checkpoint.safetensors",
        "x.checkpoint.second-pass.safetensors",
    }
    with caplog.at_level("INFO"):
        again = pipe(PROMPT, checkpoint=saved, **chosen)
    assert np.array_equal(again.frames, whole.frames)
    assert [record.getMessage().split(",")[0] for record in caplog.records if "resumed" in record.getMessage()] == [
        "resumed after step 2 of 2",
        "resumed after step 1 of 2",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"upscale": "2"}, "upscale='2' is not a number over 1"),
        ({"upscale": 1}, "upscale=1 is not a number over 1"),
        ({"upscale": 2, "upscale_by": "lanczos"}, "upscale_by='lanczos' is unknown"),
        ({"upscale": 2, "upscale_strength": 0}, "upscale_strength=0 is not a number over 0"),
        ({"upscale": 2, "upscale_steps": -1}, "upscale_steps=-1 is not allowed"),
        ({"upscale_steps": 4}, "upscale_steps is for a second pass; give upscale too"),
    ],
)
def test_a_second_pass_that_cannot_be_is_refused_before_the_first(
    chosen: Any, message: str, pipe: comfy_tpu.Pipeline
) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        pipe(PROMPT, on_progress=lambda progress: pytest.fail("it has begun"), **SIZE, **chosen)


def test_the_metadata_say_how_much_of_a_video_was_replaced(pipe: comfy_tpu.Pipeline, video: Video) -> None:
    made = pipe(PROMPT, seed=7, video=video.frames, strength=0.5, **SIZE)
    assert made.metadata["strength"] == "0.5"
    assert "strength" not in video.metadata


def test_progress_of_a_call_and_cancelling(pipe: comfy_tpu.Pipeline, video: Video) -> None:
    heard: list[comfy_tpu.Progress] = []
    pipe(PROMPT, seed=7, on_progress=heard.append, **SIZE)
    assert [each.done for each in heard if each.stage == "denoising"] == [0, 1, 2]

    def cancel(progress: comfy_tpu.Progress) -> None:
        if progress.stage == "denoising":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(PROMPT, on_progress=cancel, **SIZE)
    assert np.array_equal(pipe(PROMPT, seed=7, **SIZE).frames, video.frames), "the callback is of one call"


def test_frames_as_they_come(pipe: comfy_tpu.Pipeline, video: Video) -> None:
    async def read(limit: int) -> list[np.ndarray]:
        frames = []
        async for frame in pipe.stream(PROMPT, seed=7, **SIZE):
            frames.append(frame)
            if len(frames) == limit:
                break
        return frames

    assert np.array_equal(np.stack(asyncio.run(read(100))), video.frames)
    assert len(asyncio.run(read(1))) == 1, "a stream may be left"


@pytest.mark.slow  # by default: turns of components in tests/compiler/test_component.py
def test_leaving_the_block_frees_the_weights() -> None:
    residency = Residency(ResidencyConfig())
    stages = VideoPipeline.open(small_pipeline.directory(), comfy_tpu.RuntimeConfig(mesh="single"), residency=residency)
    with comfy_tpu.Pipeline(stages) as pipe:
        before = pipe(PROMPT, seed=7, **SIZE)
        assert residency.entries()
    assert not residency.entries()
    assert np.array_equal(pipe(PROMPT, seed=7, **SIZE).frames, before.frames), "a later call loads them again"


def test_images_of_every_kind(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    chosen: dict[str, Any] = {"num_frames": 1, "num_inference_steps": 1, "seed": 7}
    with comfy_tpu.open("demo-image", comfy_tpu.RuntimeConfig(mesh="single")) as pipe:
        expected = pipe("a red circle", images=pixels, **chosen).frames
        for given in (tmp_path / "x.png", Image.fromarray(pixels), pixels / 255, [torch.from_numpy(pixels)]):
            assert np.array_equal(pipe("a red circle", images=given, **chosen).frames, expected)
        for given, message in (
            (np.zeros((64, 64)), r"array of shape \(64, 64\), expected \(height, width, 3\)"),
            (np.full((8, 8, 3), np.nan), "float64 values, expected uint8, or floats from 0 to 1"),
            (7, "holds a int, expected a path"),
            (tmp_path / "none.png", "is not a file"),
        ):
            with pytest.raises(InvalidValueError, match=message):
                pipe("a red circle", images=given, **chosen)  # type: ignore[arg-type]
        with pytest.raises(
            InvalidValueError, match="strength=0.5 is for an image or a video that denoising starts from"
        ):
            pipe("a red circle", images=pixels, strength=0.5, **chosen)
    for lora in (7, [7]):
        with pytest.raises(InvalidValueError, match=r"lora is 7, expected a path or \(path, strength\)"):
            pipe("a red circle", lora=lora, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runtime", "field"),
    [
        ({"mesh": "single"}, "runtime"),
        (RuntimeConfig(dtype="fp16"), "dtype"),
        (RuntimeConfig(quantize="fp4"), "quantize"),  # type: ignore[arg-type]
        (RuntimeConfig(fast=True), "fast"),  # type: ignore[arg-type]
        (RuntimeConfig(attention="splash"), "attention"),  # type: ignore[arg-type]
        (RuntimeConfig(attention=AttentionConfig(sequence_parallel="rings")), "sequence_parallel"),  # type: ignore
        (RuntimeConfig(memory=ResidencyConfig(weights_fraction=5)), "weights_fraction"),
        (RuntimeConfig(memory=ResidencyConfig(budget_bytes=-1)), "budget_bytes"),
    ],
)
def test_a_runtime_is_refused_before_a_model_is_looked_for(runtime: Any, field: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{field}[= ]") as error:
        comfy_tpu.open("nowhere/nothing", runtime)
    assert error.value.field == field


def test_errors_name_the_parameters_of_this_interface(tmp_path: Path) -> None:
    pipe: Any = comfy_tpu.open("demo", RuntimeConfig(mesh="single"))
    for chosen, field in (
        ({"images": str(tmp_path / "nope.png")}, "images"),
        ({"images": np.zeros((8, 8, 3), np.uint8)}, "images"),
        ({"hieght": 64}, "hieght"),
    ):
        with pytest.raises(InvalidValueError, match=f"^{field}[= ]") as error:
            pipe("a star", **chosen)
        assert error.value.field == field
    video = Video(np.zeros((1, 8, 8, 3), np.uint8), "x", pipe.settings(), {})
    with pytest.raises(InvalidValueError, match=r"^path=.*x\.xyz names no format") as error:
        video.save(tmp_path / "x.xyz")
    assert error.value.field == "path"
