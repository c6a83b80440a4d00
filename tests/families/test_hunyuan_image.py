"""HunyuanVideo-1.5 from an image against diffusers' own pipeline."""

import functools

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.config import MESH_AXES, GenerationSettings, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.hunyuan_video import image as hunyuan_image
from comfy_tpu.pipeline.images import crop_to_frame
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import small_hunyuan
from tests.families.small_hunyuan_image import directory, image_encoder, reference
from tests.families.test_hunyuan import QUOTED, random, run
from tests.parity.small_models import SmallModel
from tests.tracing import relative_error

WIDTH, HEIGHT, FRAMES = 80, 48, 5


def picture(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height))


@pytest.mark.parametrize(
    ("mesh", "height", "width"),
    [
        # One device by default: the whole video.
        pytest.param("single", 48, 80, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=4", 32, 48, marks=pytest.mark.slow),
        ("sp=8", 48, 208),
    ],
)
def test_the_first_frame_is_encoded_as_in_diffusers(mesh: str, height: int, width: int) -> None:
    pixels = random(1, 3, 1, height, width).clamp(-1, 1)
    vae = small_hunyuan.vae()
    wanted = vae.reference.encode(pixels).latent_dist.mode() * vae.reference.config.scaling_factor
    with_encoder = SmallModel(hunyuan_image.IMAGE_VAE, vae.config, vae.reference, vae.checkpoint)

    def encode(module: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        return hunyuan_image.encode_frames(module, pixels, None)[0]

    columns = {"pixels": (None, None, None, None, MESH_AXES)}
    assert relative_error(run(with_encoder, mesh, encode, input_axes=columns, pixels=pixels), wanted) <= 1e-4


def test_the_picture_is_seen_as_in_diffusers() -> None:
    values = random(1, 3, 28, 28)
    wanted = image_encoder().reference(values).last_hidden_state
    for mesh in ("single", "dp=2,tp=4"):
        actual = run(image_encoder(), mesh, hunyuan_image.embed_image, pixel_values=values)
        assert relative_error(actual["image"], wanted) <= 1e-4


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open(directory(), RuntimeConfig(mesh=mesh))


def video(image: Image.Image, mesh: str = "single", **size: int) -> torch.Tensor:
    pipeline = opened(mesh)
    settings = pipeline.settings(
        **size,
        num_frames=FRAMES,
        num_inference_steps=2,
        seed=7,
        negative_prompt="left",
        max_sequence_length=small_hunyuan.TEXT_TOKENS,
    )
    return torch.cat(list(pipeline.generate(QUOTED, settings, [image])), dim=1)


def expected(image: Image.Image) -> torch.Tensor:
    return reference()(
        image,
        QUOTED,
        negative_prompt="left",
        num_frames=FRAMES,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    ).frames.permute(0, 1, 3, 4, 2)


@pytest.mark.thorough  # by default: the encoded picture, above, and the video without one, test_hunyuan.py
@pytest.mark.parametrize(
    ("mesh", "width", "height"),
    [
        ("single", 61, 143),
        pytest.param("dp=2,tp=4", WIDTH, HEIGHT, marks=pytest.mark.slow),
        # On one device at this size: the next test.
        pytest.param("single", WIDTH, HEIGHT, marks=pytest.mark.slow),
        pytest.param("dp=2,sp=4", 61, 143, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=4", 61, 143, marks=pytest.mark.slow),
        pytest.param("dp=2,sp=4", WIDTH, HEIGHT, marks=pytest.mark.slow),
    ],
)
def test_the_video_is_that_of_diffusers_on_every_mesh(mesh: str, width: int, height: int) -> None:
    """At the size that diffusers chooses by the image."""
    wanted = expected(picture(width, height))
    actual = video(picture(width, height), mesh, height=wanted.shape[2], width=wanted.shape[3])
    assert psnr(actual, wanted) >= SAME


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height"),
    [(143, 61), pytest.param(61, 143, marks=pytest.mark.slow), pytest.param(200, 30, marks=pytest.mark.slow)],
)
def test_the_video_is_that_of_diffusers_at_a_size_of_another_shape(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reference().video_processor, "calculate_default_height_width", lambda **_: (HEIGHT, WIDTH), raising=True
    )
    actual = video(picture(width, height), height=HEIGHT, width=WIDTH)
    assert psnr(actual, expected(picture(width, height))) >= SAME


@pytest.mark.parametrize("given", [(80, 48), (61, 143), (143, 61), (200, 30), (7, 5), (1000, 999)])
@pytest.mark.parametrize("size", [(80, 48), (48, 80), (64, 64), (1280, 720)])
def test_a_picture_is_cropped_as_in_diffusers(given: tuple[int, int], size: tuple[int, int]) -> None:
    width, height = size
    image = picture(*given)
    wanted = reference().video_processor.resize(image, height=height, width=width, resize_mode="crop")
    actual = crop_to_frame(image, GenerationSettings(width=width, height=height))
    assert np.array_equal(np.asarray(actual), np.asarray(wanted))


def test_a_picture_that_would_become_too_long_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="image is 4000×2, too long to fill 80×48; cut a piece out of it"):
        crop_to_frame(picture(4000, 2), GenerationSettings(width=80, height=48))
