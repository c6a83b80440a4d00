"""A second pass at a larger size is what one would do by hand; what cannot have one is refused before weights are
loaded."""

import dataclasses
import functools
import json
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from comfy_tpu.cli.main import main
from comfy_tpu.config import GenerationSettings, RuntimeConfig, SecondPass
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import model_cards
from comfy_tpu.jobs.execution import Executor
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import Outcome
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline import artifacts, media, second_pass
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.initial import INITIAL, STRENGTH
from comfy_tpu.pipeline.latent_resizing import resize_frames
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import Frames
from tests.families import small_flux, small_flux2, wan_pipelines
from tests.jobs.test_previews import run_jobs

PROMPT = "a red circle moving right on a black background"
CARDS = {card.name: card for card in model_cards()}


@functools.cache
def opened() -> VideoPipeline:
    return VideoPipeline.open("demo", RuntimeConfig(mesh="single"))


@functools.cache
def first_pass() -> Any:
    pipeline = opened()
    settings = pipeline.settings(height=32, width=48, num_frames=5, num_inference_steps=2, num_videos=2)
    embeddings = pipeline.encode(PROMPT, settings)
    return settings, embeddings, pipeline.denoise(embeddings, settings)


def test_latents_by_hand() -> None:
    pipeline, (settings, embeddings, latents) = opened(), first_pass()
    second = SecondPass(1.5, strength=0.5, steps=4)
    made, larger = second_pass.denoise_again(pipeline, embeddings, latents, settings, second)
    assert (larger.height, larger.width, larger.num_inference_steps) == (48, 64, 4)  # 72 is no multiple of 16
    by_hand = [
        torch.stack([F.interpolate(video[None, :, n], (6, 8), mode="bicubic")[0] for n in range(2)], dim=1)
        for video in latents
    ]
    shared = {INITIAL: torch.stack(by_hand), STRENGTH: torch.tensor([[0.5]])}
    expected = pipeline.denoise(dataclasses.replace(embeddings, shared=shared), larger)
    assert made.shape == (2, 16, 2, 6, 8)
    assert torch.equal(made, expected)
    swapped = {**shared, INITIAL: shared[INITIAL].flip(0)}
    other = pipeline.denoise(dataclasses.replace(embeddings, shared=swapped), larger)
    assert not torch.allclose(made, other, atol=0.1), "each video has its own start"


def test_pixels_are_held_as_bytes() -> None:
    """No more than one part of what is decoded is there at a time."""
    card, parts, latents = CARDS["Wan 2.1"], torch.rand(3, 2, 4, 32, 48, 3), torch.zeros(1)
    held: list[weakref.ref[torch.Tensor]] = []
    seen: list[npt.NDArray[np.uint8]] = []

    def decode(*given: Any) -> Iterator[torch.Tensor]:
        for number in range(3):
            assert sum(part() is not None for part in held) <= 1
            part = parts[number].clone()
            held.append(weakref.ref(part))
            yield part
            del part

    def encode(frames: npt.NDArray[np.uint8], settings: GenerationSettings) -> torch.Tensor:
        seen.append(frames)
        assert (settings.num_videos, settings.height, settings.width) == (1, 64, 96)
        return latents

    pipeline: Any = types.SimpleNamespace(decode=decode, encode_frames=encode, family=types.SimpleNamespace(card=card))
    first = dataclasses.replace(card.defaults, height=32, width=48, num_frames=12, num_videos=2)
    larger = dataclasses.replace(first, height=64, width=96)
    assert len(second_pass.upscale_latents(pipeline, latents, first, larger, "pixels")) == 2
    for row, frames in enumerate(seen):
        assert (frames.dtype, frames.shape) == (np.uint8, (12, 32, 48, 3))
        assert np.array_equal(frames, torch.cat(list(parts), dim=1)[row].mul(255).round().byte().numpy())


@pytest.mark.slow
def test_pixels_by_hand() -> None:
    """The same as video-to-video from the resized frames of the first pass."""
    pipeline, (settings, embeddings, latents) = opened(), first_pass()
    second = SecondPass(2, strength=0.5, by="pixels")
    made, larger = second_pass.denoise_again(pipeline, embeddings, latents, settings, second)
    frames = torch.cat(list(pipeline.decode(latents, settings)), dim=1)[1].mul(255).round().byte().numpy()
    resized = np.stack(
        [np.asarray(Image.fromarray(each).resize((96, 64), Image.Resampling.LANCZOS)) for each in frames]
    )
    given = GivenMedia(videos={"video": Frames(resized)}, strength=0.5)
    alone = dataclasses.replace(larger, num_videos=1)
    shared = pipeline.encode_media(given, alone)
    noise_of_both = dataclasses.replace(embeddings, shared=shared)
    expected = pipeline.denoise(noise_of_both, larger)
    torch.testing.assert_close(made[1], expected[1], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_images() -> None:
    pipeline = VideoPipeline.open(small_flux.directory("dev"), RuntimeConfig(mesh="single"))
    settings = pipeline.settings(height=32, width=32, num_inference_steps=2)
    embeddings = pipeline.encode("a cat", settings)
    latents = pipeline.denoise(embeddings, settings)
    for by in ("latent-nearest", "pixels"):
        made, larger = second_pass.denoise_again(pipeline, embeddings, latents, settings, SecondPass(2, 0.6, 4, by))
        (frames,) = pipeline.decode(made, larger)
        assert frames.shape == (1, 1, 64, 64, 3)


@pytest.mark.parametrize("by", ["latent", "latent-bilinear", "latent-nearest"])
def test_resized_latents(by: str) -> None:
    steps = torch.arange(4.0).view(1, 1, 1, 1, 4).expand(2, 3, 2, 4, 4)
    made = resize_frames(steps, (8, 8), by)
    assert made.shape == (2, 3, 2, 8, 8)
    assert torch.all(made[..., 1:] >= made[..., :-1])
    assert (made[0, 0, 0, 0].unique().numel() == 4) is (by == "latent-nearest")


@pytest.mark.parametrize(
    ("model", "chosen", "field", "message"),
    [
        ("Wan 2.1", {"scale": 1.0}, "upscale", "upscale=1.0 is not a number over 1, up to 8; 2 doubles both sides"),
        ("Wan 2.1", {"scale": "two"}, "upscale", "upscale='two' is not a number over 1"),
        (
            "Wan 2.1",
            {"scale": 3.0},
            "upscale",
            r"upscale=3 of 1280×720 is 3840×2160: height=2160 is outside 16 to 2048",
        ),
        (
            "Wan 2.1",
            {"scale": 1.005},
            "upscale",
            "upscale=1.005 of 1280×720 is 1280×720 again, because sides are multiples of 16; use a larger factor, such "
            r"as 1\.012$",
        ),
        (
            "Wan 2.1",
            {"scale": 1.5, "by": "ai"},
            "upscale_by",
            "upscale_by='ai' is unknown; choose from latent, latent-",
        ),
        ("Wan 2.1", {"scale": 1.5, "strength": 1.5}, "upscale_strength", "upscale_strength=1.5 is not a number over 0"),
        ("Wan 2.1", {"scale": 1.5, "strength": 0.01}, "upscale_strength", "0.01 leaves none of 50 steps; use 0.02"),
        ("Wan 2.1", {"scale": 1.5, "steps": 2000}, "upscale_steps", "upscale_steps=2000 is not allowed; give a whole"),
        ("Wan 2.2 Animate", {"scale": 1.5}, "upscale", "whole video, and x makes videos segment by segment; leave it"),
        (
            "HunyuanVideo-1.5",
            {"scale": 1.5, "by": "pixels"},
            "upscale_by",
            "encodes the whole result, which x does not do here; choose latent$",
        ),
        ("LTX-2", {"scale": 1.5, "by": "latent-nearest", "strength": 0.0}, "upscale_strength", "upscale_strength=0.0"),
    ],
)
def test_refused(model: str, chosen: dict[str, Any], field: str, message: str) -> None:
    card = CARDS[model]
    with pytest.raises(InvalidValueError, match=message) as caught:
        second_pass.check_second_pass(card, "x", card.defaults, SecondPass(**chosen))
    assert caught.value.field == field


def test_a_strength_that_is_no_number_is_refused_before_steps_are_counted() -> None:
    settings, embeddings, latents = first_pass()
    with pytest.raises(InvalidValueError, match="strength=nan is not a number over 0, up to 1"):
        opened().denoise(second_pass.start_from(embeddings, latents, float("nan")), settings)


def test_a_video_that_is_continued_has_none() -> None:
    card = CARDS["Wan 2.2 image-to-video"]
    first = dataclasses.replace(card.defaults, num_frames=161, context_frames=81, context="continue")
    with pytest.raises(InvalidValueError, match="161 frames is continued every 81; ask for 81") as caught:
        second_pass.check_second_pass(card, "x", first, SecondPass(1.5))
    assert caught.value.field == "upscale"
    second_pass.check_second_pass(card, "x", dataclasses.replace(first, num_frames=81), SecondPass(1.5))


def test_the_factor_that_is_named_instead_makes_one_side_larger() -> None:
    """At every size, of which the smallest have the coarsest steps."""
    card = CARDS["Wan 2.1"]
    for side in range(16, 1025, 16):
        first = dataclasses.replace(card.defaults, height=side, width=side)
        with pytest.raises(InvalidValueError, match="again") as caught:
            second_pass.upscaled_settings(card, "x", first, 1.0001, "latent")
        factor = float(str(caught.value).rpartition(" ")[2])
        assert second_pass.upscaled_settings(card, "x", first, factor, "latent").width == side + 16


def test_values_of_a_command_line() -> None:
    assert second_pass.read_second_pass({"upscale": None}) is None
    assert second_pass.read_second_pass({"upscale": 2.0}) == SecondPass(2.0)
    given = {"upscale": 2.0, "upscale_strength": 0.3, "upscale_steps": 8, "upscale_by": "pixels"}
    assert second_pass.read_second_pass(given) == SecondPass(2.0, 0.3, 8, "pixels")
    with pytest.raises(InvalidValueError, match="upscale_by is for a second pass; give upscale too, or leave it out"):
        second_pass.read_second_pass({"upscale_by": "pixels"})


def test_upscale_is_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a weight: latents are resized."""
    pipeline, path = opened(), tmp_path / "latents.safetensors"
    settings = pipeline.settings(height=32, width=48, num_frames=5)
    latents = torch.randn(pipeline.latent_shape(settings))
    artifacts.save_latents(path, latents, PROMPT, settings, pipeline)
    assert main(["upscale", str(path), "--scale", "2", "--by", "latent-bilinear"]) == 0
    made, header = artifacts.load_latents(tmp_path / "upscaled.safetensors", pipeline)
    assert torch.equal(made, resize_frames(latents, (8, 12), "latent-bilinear"))
    assert (header.settings.height, header.settings.width, header.prompt) == (64, 96, PROMPT)
    assert main(["upscale", str(path), "--scale", "2", "--by", "latent-bilinear"]) == 0
    assert "is there already" in capsys.readouterr().err
    assert main(["upscale", str(path), "--scale", "2"]) == 0
    assert "is there already" not in capsys.readouterr().err
    assert main(["upscale", str(path), "--scale", "1.1"]) == 1
    assert "--scale 1.1 of 48×32 is 48×32 again, because sides are multiples of 16" in capsys.readouterr().err
    assert main(["upscale", str(path), "--scale", "0"]) == 1
    assert "--scale 0.0 is not a number over 1, up to 8" in capsys.readouterr().err


@pytest.mark.slow
def test_jobs(tmp_path: Path) -> None:
    common = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 4}
    second = {"upscale": 2.0, "upscale_strength": 0.5}
    run_jobs(tmp_path, [PROMPT, PROMPT], [], batch_size=2, suffix=".npy", model="demo", **common, **second)
    made = [np.load(tmp_path / f"{number}.npy") for number in range(2)]
    assert [video.shape for video in made] == [(5, 64, 96, 3)] * 2
    pipeline = opened()
    settings = pipeline.settings(**common, seed=1)
    embeddings = pipeline.encode(PROMPT, settings)
    latents = pipeline.denoise(embeddings, settings)
    again, larger = second_pass.denoise_again(pipeline, embeddings, latents, settings, SecondPass(2.0))
    frames = torch.cat(list(pipeline.decode(again, larger)), dim=1)[0]
    assert np.abs(made[1].astype(float) / 255 - frames.numpy()).max() <= 1.5 / 255
    assert np.abs(made[0].astype(int) - made[1]).max() > 50, "each job has its own seed"


def test_a_job_whose_second_pass_cannot_be_is_refused_before_the_first(tmp_path: Path) -> None:
    picture, folder = tmp_path / "image.png", Folder(str(tmp_path / "made"))
    Image.new("RGB", (80, 80)).save(picture)
    folder.prepare()
    outcomes: list[Outcome] = []
    executor = Executor(
        folder, on_outcome=outcomes.append, on_progress=lambda progress: pytest.fail(f"it has begun: {progress}")
    )
    chosen = {"height": 64, "width": 64, "num_inference_steps": 1, "tile": "64x64", "upscale": 2.0}
    values = {"model": str(small_flux2.directory("klein")), "prompt": PROMPT, "image": [str(picture)], **chosen}
    executor.run([Job("a", Request(values), "a.png", 1)])
    executor.close()
    (outcome,) = outcomes
    assert outcome.state == "failed"
    assert "looks at all of image with it; leave one of them out" in outcome.error


def test_strength_without_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline, path = opened(), tmp_path / "text.safetensors"
    settings, embeddings, _ = first_pass()
    artifacts.save_text(path, embeddings, settings, pipeline)
    assert main(["denoise", str(path), "--strength", "0.5"]) == 1
    assert "--strength 0.5 is for latents to start from; give --latents" in capsys.readouterr().err
    assert main(["denoise", str(path), "--latents", str(tmp_path / "x.safetensors")]) == 1
    assert "x.safetensors does not exist; make it with `comfy-tpu denoise" in capsys.readouterr().err


@pytest.mark.slow
def test_stages_together_are_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--height", "32", "--width", "48", "--num-frames", "5", "--steps", "4"]
    upscale = ["--upscale", "2", "--upscale-strength", "0.5", "--upscale-steps", "6", "--upscale-by", "pixels"]
    assert main(["generate", PROMPT, *flags, *upscale, "-o", "at-once.npy"]) == 0
    assert main(["encode", PROMPT, *flags]) == 0
    assert main(["denoise", "text.safetensors"]) == 0
    assert main(["upscale", "latents.safetensors", "--scale", "2", "--by", "pixels"]) == 0
    second = ["--latents", "upscaled.safetensors", "--strength", "0.5", "--steps", "6", "-o", "second.safetensors"]
    assert main(["denoise", "text.safetensors", *second]) == 0
    assert main(["decode", "second.safetensors", "-o", "stages.npy"]) == 0
    at_once, stages = np.load("at-once.npy"), np.load("stages.npy")
    assert at_once.shape == (5, 64, 96, 3)
    assert np.array_equal(at_once, stages)
    assert main(["generate", PROMPT, *flags, *upscale, "-o", "at-once.png", "--num-frames", "1"]) == 0
    note = json.loads(media.read_metadata("at-once.png")["second_pass"])
    assert note == {"scale": 2.0, "strength": 0.5, "steps": 6, "by": "pixels", "from": "48x32", "from_steps": 4}


@pytest.mark.thorough
def test_an_image_is_encoded_for_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, stage by stage, and in a batch."""
    monkeypatch.chdir(tmp_path)
    wan_pipelines.picture(1, 90, 40).save("given.png")
    model = ["--model", str(wan_pipelines.directory("2.1 image")), "--mesh", "single"]
    small, large = (["--height", str(side), "--width", str(side * 3 // 2), *model] for side in (32, 64))
    given = ["--image", "given.png", "--num-frames", "5", "--steps", "4"]
    second = ["--upscale", "2", "--upscale-strength", "0.5"]
    assert main(["generate", PROMPT, *given, *small, *second, "-o", "at-once.npy"]) == 0
    assert main(["encode", PROMPT, *given, *small]) == 0
    assert main(["denoise", "text.safetensors", *model]) == 0
    assert main(["upscale", "latents.safetensors", "--scale", "2", *model]) == 0
    begun = ["--latents", "upscaled.safetensors", "--strength", "0.5", "-o", "second.safetensors"]
    capsys.readouterr()
    assert main(["denoise", "text.safetensors", *begun, *model]) == 1
    assert "the image was encoded for other sizes" in (said := capsys.readouterr().err)
    assert "encode it for 96×64×5" in said
    assert main(["encode", PROMPT, *given, *large, "-o", "large.safetensors"]) == 0
    assert main(["denoise", "large.safetensors", *begun, *model]) == 0
    assert main(["decode", "second.safetensors", "-o", "stages.npy", *model]) == 0
    Path("jobs.jsonl").write_text(json.dumps({"prompt": PROMPT, "image": "given.png", "output": "job.npy"}))
    assert main(["batch", "jobs.jsonl", "-o", ".", *given[2:], *small, *second]) == 0
    at_once, stages, job = (np.load(f"{name}.npy") for name in ("at-once", "stages", "job"))
    assert at_once.shape == (5, 64, 96, 3)
    assert np.array_equal(at_once, stages)
    assert np.array_equal(at_once, job)
