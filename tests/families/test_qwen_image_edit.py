"""Qwen-Image-Edit and Edit Plus against diffusers' own pipelines: images that transformer and text encoder see.

Images are scaled to a million pixels, whatever their size; here to a sixteenth of that, but for one slow test:
`reduced_areas`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.qwen_image import image as qwen_image
from comfy_tpu.families.qwen_image.card import RESULT_AREA
from comfy_tpu.families.qwen_image.text import shown_length
from comfy_tpu.families.shared.sizes import target_size
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.covering import covering
from tests.families import small_qwen_image
from tests.families.meshes import MESHES
from tests.families.pieces import component
from tests.families.test_qwen_image import CHOSEN, PROMPT, SIZES, opened
from tests.families.wan_pipelines import picture
from tests.tracing import relative_error

# Wide: of 16 × 16 and more tokens, none of whose windows of the vision model are whole at the edges.
ONE = [picture(1, 100, 75)]
TWO = [picture(1, 100, 75), picture(2, 64, 96)]
GIVEN = {"edit": ONE, "plus": TWO, "2511": TWO}


def made(pipeline: VideoPipeline, images: list[Image.Image], prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    settings = pipeline.settings(**(CHOSEN | changed))
    return torch.cat(list(pipeline.generate(prompt, settings, images)), dim=1)[:, 0]


def expected(variant: str, images: list[Image.Image], prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    chosen = CHOSEN | changed
    given = small_qwen_image.reference(variant)(
        prompt=prompt,
        image=images[0] if variant == "edit" else list(images),
        true_cfg_scale=chosen["guidance_scale"],
        num_images_per_prompt=chosen.get("num_videos", 1),
        **{name: chosen[name] for name in ("height", "width", "num_inference_steps", "negative_prompt")},
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
    ).images
    return given.permute(0, 2, 3, 1)


@pytest.mark.usefixtures("reduced_areas")
@covering(
    "variant, mesh, size",
    ["edit", "plus", "2511"],
    MESHES,  # all that `auto` takes: AUTO in meshes.py
    SIZES,
    strength=0,
    # Edit on one device: the next test. On meshes by default: test_qwen_image.py, whose transformer it is.
    always=[("2511", "single", (48, 80))],
)
def test_the_picture_is_that_of_diffusers(variant: str, mesh: str, size: tuple[int, int]) -> None:
    images, chosen = GIVEN[variant], {"height": size[0], "width": size[1]}
    reference = expected(variant, images, **chosen)
    assert reference.std() > 0.05, "the reference shows something"
    assert psnr(made(opened(variant, mesh), images, **chosen), reference) >= SAME


@pytest.mark.thorough  # by default: that of Qwen-Image, test_qwen_image.py
@pytest.mark.usefixtures("reduced_areas")
@pytest.mark.parametrize("variant", ["edit", pytest.param("plus", marks=pytest.mark.slow)])
def test_one_program_does_for_all_prompts_and_images_of_a_size(variant: str) -> None:
    pipeline, images = opened(variant), GIVEN[variant]
    first = made(pipeline, images)
    assert psnr(first, expected(variant, images)) >= SAME
    others = [picture(5, image.width, image.height) for image in images]
    with count_compilations() as count:
        second = made(pipeline, others, "a")
    assert count.requested == 0, "neither a prompt nor an image compiles anything"
    assert psnr(second, expected(variant, others, "a")) >= SAME
    assert psnr(second, first) < SAME - 30


@pytest.mark.slow
@pytest.mark.usefixtures("reduced_areas")
def test_the_order_of_images_and_several_pictures() -> None:
    pipeline = opened("plus")
    actual = made(pipeline, TWO, num_videos=2)
    assert psnr(actual, expected("plus", TWO, num_videos=2)) >= SAME
    assert psnr(actual[:1], made(pipeline, TWO[::-1])) < SAME - 3, "their order counts"
    assert psnr(actual[:1], actual[1:]) < 40


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["edit", "plus"])
def test_images_of_a_million_pixels(variant: str) -> None:
    chosen = {"num_inference_steps": 2, "guidance_scale": 1.0}
    assert psnr(made(opened(variant), ONE, **chosen), expected(variant, ONE, **chosen)) >= SAME


@pytest.mark.slow  # pictures are compared by default
@pytest.mark.usefixtures("reduced_areas")
@pytest.mark.parametrize("mesh", ["single", "dp=2,tp=4"])
@pytest.mark.parametrize("scan", [True, False])
def test_text_encoder(mesh: str, scan: bool) -> None:
    pipeline = opened("plus")
    reference = small_qwen_image.reference("plus")
    shown = [qwen_image.shrink(image) for image in TWO]
    wanted, _ = reference.encode_prompt([PROMPT], image=shown)
    (encoder,) = pipeline.family.text.encoders
    assert encoder.tokenize is not None
    assert encoder.read_images is not None
    pixels = encoder.read_images(small_qwen_image.image_processor(), TWO)
    tokens = encoder.tokenize(pipeline.files.tokenizer("tokenizer"), [PROMPT], 40, **pixels)
    found, weights = component(pipeline, encoder.component, mesh, scan=scan)
    actual = to_host(found.program(encoder.encode)(weights, **tokens, **pixels)["text"])
    assert actual.shape[1] == shown_length([tuple(x.shape[:2]) for x in pixels.values()], 40)
    assert relative_error(actual[:, : wanted.shape[1]], wanted) <= 1e-4
    assert not actual[:, wanted.shape[1] :].any()


@pytest.mark.parametrize("size", [(100, 75), (64, 96), (2000, 21), (1, 100), (5000, 5000)])
def test_sizes_are_those_of_diffusers(size: tuple[int, int]) -> None:
    for area in (RESULT_AREA, qwen_image.SHOWN_AREA):
        wanted = pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])
        assert target_size(*size, area) == wanted


@pytest.fixture
def unloaded() -> tuple[VideoPipeline, list[str]]:
    """A pipeline, and what it reports to load or run."""
    told: list[str] = []
    pipeline = VideoPipeline.open(
        small_qwen_image.directory("plus"),
        RuntimeConfig(mesh="single"),
        on_progress=lambda progress: told.append(progress.what),
    )
    return pipeline, told


@pytest.mark.parametrize(
    ("images", "prompt", "message"),
    [
        ([], PROMPT, r"image is missing: model .* begins with an image; give one"),
        (ONE * 5, PROMPT, r"image is given 5 times, but model .* takes 4 at most; leave the others out"),
        ([picture(1, 505, 5)], PROMPT, "image is 505×5, expected one side at most 100 times the other; crop it"),
        (ONE, "a <|image_pad|>", r"prompt holds <\|image_pad\|>, which stands for an image in the model's template"),
        (ONE, " ", "prompt=' ' is empty"),
    ],
)
def test_what_is_refused_before_weights_are_loaded(
    images: list[Image.Image], prompt: str, message: str, unloaded: tuple[VideoPipeline, list[str]]
) -> None:
    pipeline, told = unloaded
    with pytest.raises(InvalidValueError, match=message):
        pipeline.encode(prompt, pipeline.settings(**CHOSEN), images)
    assert not told


def test_edit_takes_one_image_and_qwen_image_starts_from_one() -> None:
    for variant, count, message in [
        ("edit", 2, r"image is given 2 times, but model .* takes 1 at most; leave the others out"),
        ("image", 2, r"image is given 2 times, but model .* starts from one image; leave the others out"),
    ]:
        pipeline = opened(variant)
        with pytest.raises(InvalidValueError, match=message):
            pipeline.encode(PROMPT, pipeline.settings(**CHOSEN), TWO[:count])


def test_images_that_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ONE[0].save("0.png")
    Path("broken.png").write_bytes(b"no image")
    models = {name: str(small_qwen_image.directory(name)) for name in ("image", "edit", "plus")}
    for variant, more, message in [
        ("edit", [], "begins with an image; give one"),
        ("edit", ["--image", "0.png"] * 2, "--image is given 2 times"),
        ("plus", ["--image", "0.png"] * 5, "--image is given 5 times"),
        ("plus", ["--image", "none.png"], "none.png is not a file"),
        ("plus", ["--image", "broken.png"], "broken.png cannot be read as an image"),
        ("plus", ["--image", "0.png", "--last-image", "0.png"], "--last-image is for videos; leave it out"),
        ("plus", ["--image", "0.png", "--strength", "0.5"], "--strength"),
        ("image", ["--image", "0.png"] * 2, "--image is given 2 times"),
    ]:
        assert cli.main(["generate", PROMPT, "--model", models[variant], "--mesh", "single", *more]) == 1
        captured = capsys.readouterr().err
        assert message in captured, (variant, more, captured)
        assert "loading" not in captured.lower()


@pytest.mark.slow
@pytest.mark.usefixtures("reduced_areas")
def test_stages_hand_the_images_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, image in enumerate(TWO):
        image.save(f"{number}.png")
    model = ["--model", str(small_qwen_image.directory("plus")), "--mesh", "single"]
    command = [*model, "--height", "48", "--width", "80", "--steps", "2", "--seed", "7"]
    given = ["--image", "0.png", "--image", "1.png"]
    assert cli.main(["generate", PROMPT, *command, *given]) == 0
    assert cli.main(["encode", PROMPT, *command, *given]) == 0
    assert cli.main(["denoise", "text.safetensors", *model]) == 0
    assert cli.main(["decode", "latents.safetensors", *model, "--output", "staged.png"]) == 0
    with Image.open("image.png") as one, Image.open("staged.png") as other:
        assert one.tobytes() == other.tobytes()
