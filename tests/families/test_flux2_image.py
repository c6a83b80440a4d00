"""Flux.2 with images to look at, against diffusers' own pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_tpu.cli import main as cli
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.flux2.image import fit
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import small_flux2
from tests.families.meshes import on_every_mesh
from tests.families.test_flux2 import CHOSEN, PROMPT, opened
from tests.families.test_flux2 import picture as drawn
from tests.families.wan_pipelines import picture

# 4 × 6 tokens, which sp=4 divides, with the 15 of the image or not; and one that is cut on all sides.
ONE = [picture(1, 96, 64)]
TWO = [picture(1, 100, 75), picture(2, 64, 96)]


def made(pipeline: VideoPipeline, images: list[Image.Image], **changed: Any) -> torch.Tensor:
    settings = pipeline.settings(**(CHOSEN | changed))
    return torch.cat(list(pipeline.generate(PROMPT, settings, images)), dim=1)[:, 0]


def expected(variant: str, images: list[Image.Image], **changed: Any) -> torch.Tensor:
    chosen = {name: value for name, value in (CHOSEN | changed).items() if name != "seed"}
    given = small_flux2.reference(variant)(
        prompt=PROMPT,
        image=list(images),
        **{("num_images_per_prompt" if name == "num_videos" else name): value for name, value in chosen.items()},
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
    ).images
    return given.permute(0, 2, 3, 1)


@on_every_mesh("variant", ["base", "dev", "klein"])
def test_one_picture(mesh: str, variant: str) -> None:
    pipeline = opened(variant, mesh)
    without = drawn(pipeline)
    actual = made(pipeline, ONE)
    assert psnr(actual, expected(variant, ONE)) >= SAME
    assert psnr(actual, without) < 60, "the image has its part in it"
    assert torch.equal(drawn(pipeline), without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "mesh"),
    [
        ("klein", "single"),
        pytest.param("base", "dp=2,sp=4", marks=pytest.mark.slow),
        pytest.param("dev", "dp=2,tp=4", marks=pytest.mark.slow),  # one image on this mesh: the test above
    ],
)
def test_two_pictures_of_other_sizes(variant: str, mesh: str) -> None:
    pipeline = opened(variant, mesh)
    actual = made(pipeline, TWO, height=64, width=64)
    assert psnr(actual, expected(variant, TWO, height=64, width=64)) >= SAME
    assert psnr(actual, made(pipeline, TWO[::-1], height=64, width=64)) < 90, "their order counts"


@pytest.mark.slow
def test_several_pictures_from_one() -> None:
    actual = made(opened("base"), ONE, num_videos=2)
    assert actual.shape[0] == 2
    assert psnr(actual, expected("base", ONE, num_videos=2)) >= SAME


@pytest.mark.parametrize(
    ("size", "fitted"), [((100, 75), (96, 64)), ((2048, 1024), (1440, 720)), ((64, 512), (64, 512))]
)
def test_sizes(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    processor = small_flux2.reference("klein").image_processor
    image = picture(3, *size)
    whole = processor._resize_if_exceeds_area(processor.check_image_input(image))
    theirs = processor.preprocess(whole, height=fitted[1], width=fitted[0], resize_mode="crop")
    ours = fit(image)
    assert ours.size == fitted
    assert psnr(processor.preprocess(ours), theirs) >= SAME


@pytest.mark.parametrize("size", [(63, 100), (64, 513)])
def test_sizes_that_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidValueError, match=rf"image is {size[0]}×{size[1]}, expected sides of 64 or more pixels"):
        fit(picture(3, *size))


def test_they_are_refused_before_the_text_encoder_is_loaded() -> None:
    told: list[str] = []
    pipeline = VideoPipeline.open(
        small_flux2.directory("klein"),
        RuntimeConfig(mesh="single"),
        on_progress=lambda progress: told.append(progress.what),
    )
    with pytest.raises(InvalidValueError, match="image is 63×100"):
        pipeline.encode(PROMPT, pipeline.settings(**CHOSEN), [picture(3, 63, 100)])
    assert not told


def test_too_many_and_those_of_other_models() -> None:
    pipeline = opened("klein")
    settings = pipeline.settings(**CHOSEN)
    with pytest.raises(InvalidValueError, match=r"image is given 5 times, but model .* takes 4 at most; leave"):
        pipeline.encode(PROMPT, settings, ONE * 5)
    embeddings = pipeline.encode(PROMPT, settings, ONE)
    assert {name: tuple(rows.shape) for name, rows in embeddings.shared.items()} == {"reference_1": (1, 16, 1, 4, 6)}
    other = {"condition": torch.zeros(1, 20, 1, 3, 5)}
    with pytest.raises(
        InvalidValueError, match=r"was encoded for another model: .* does not read condition; encode it"
    ):
        pipeline.denoise(type(embeddings)(PROMPT, embeddings.positive, None, shared=other), settings)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Model and settings, in a directory with the images 0.png and 1.png."""
    monkeypatch.chdir(tmp_path)
    for number, image in enumerate(TWO):
        image.save(f"{number}.png")
    model = ["--model", str(small_flux2.directory("klein")), "--mesh", "single"]
    return [*model, "--height", "48", "--width", "80", "--steps", "4", "--seed", "7"]


@pytest.mark.slow  # stages by default: test_flux.py
def test_stages_hand_the_images_on(command: list[str]) -> None:
    given = ["--image", "0.png", "--image", "1.png"]
    assert cli.main(["generate", PROMPT, *command, *given]) == 0
    assert len(media.read_metadata("image.png")["pictures"]) == 16, "the fingerprint of what they show"
    assert cli.main(["encode", PROMPT, *command, *given]) == 0
    assert cli.main(["denoise", "text.safetensors", *command[:4]]) == 0
    assert cli.main(["decode", "latents.safetensors", *command[:4], "--output", "staged.png"]) == 0
    with Image.open("image.png") as one, Image.open("staged.png") as other:
        assert one.tobytes() == other.tobytes()


def test_images_that_the_command_refuses(command: list[str], capsys: Any) -> None:
    for more, message in [
        (["--image", "0.png", "--last-image", "1.png"], "--last-image is for videos; leave it out"),
        (
            ["--image", "0.png", "--strength", "0.5"],
            "--strength 0.5 is for an image or a video that denoising starts from",
        ),
        (["--image", "0.png"] * 5, "--image is given 5 times"),
    ]:
        assert cli.main(["generate", PROMPT, *command, *more]) == 1
        assert message in capsys.readouterr().err
