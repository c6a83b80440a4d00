"""Flux.1 against diffusers' own pipeline, across meshes, sizes, schedulers and stages."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline, UniPCMultistepScheduler
from PIL import Image
from safetensors.torch import load_file, save_file

from comfy_tpu.bridge import to_host
from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.flux import transformer as flux_transformer
from comfy_tpu.families.flux.model import FLUX_DEV, FLUX_SCHNELL
from comfy_tpu.families.shared import patches
from comfy_tpu.families.shared.timesteps import round_guidance, round_timestep
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.images import read_image
from comfy_tpu.pipeline.schedule import make_schedule
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import lower_flux, small_flux
from tests.families.meshes import AUTO, on_every_mesh
from tests.families.pieces import component
from tests.lowering import assert_bounded_work, measure_lowering
from tests.tracing import relative_error

PROMPT = "a red circle moving left"
# 15 tokens, which nothing divides, and 16, which lie evenly on any mesh; the text has 32.
SIZES = [(48, 80), (64, 64)]
CHOSEN: dict[str, Any] = {
    "height": 48,
    "width": 80,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "max_sequence_length": 32,
    "seed": 7,
}
VARIANTS = ["dev", "schnell"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def opened(variant: str, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(small_flux.directory(variant), RuntimeConfig(mesh=mesh))


def picture(pipeline: VideoPipeline, prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    return torch.cat(list(pipeline.generate(prompt, pipeline.settings(**(CHOSEN | changed)))), dim=1)[:, 0]


@functools.cache
def expected(variant: str, scheduler: str = "euler", num_videos: int = 1, **changed: Any) -> torch.Tensor:
    pipeline = small_flux.reference(variant)
    own = pipeline.scheduler
    if scheduler == "unipc":
        pipeline.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            use_dynamic_shifting=variant == "dev",
            time_shift_type="exponential",
        )
    chosen = {name: value for name, value in (CHOSEN | changed).items() if name != "seed"}
    pipeline.set_progress_bar_config(disable=True)
    try:
        images = pipeline(
            PROMPT,
            **chosen,
            num_images_per_prompt=num_videos,
            generator=torch.Generator().manual_seed(CHOSEN["seed"]),
            output_type="pt",
        ).images
    finally:
        pipeline.scheduler = own
    return images.permute(0, 2, 3, 1)


@on_every_mesh("height,width", SIZES)
def test_the_picture_of_dev_is_that_of_diffusers_on_every_mesh(mesh: str, height: int, width: int) -> None:
    reference = expected("dev", height=height, width=width)
    assert reference.std() > 0.05, "the reference shows something"
    assert psnr(picture(opened("dev", mesh), height=height, width=width), reference) >= SAME


@pytest.mark.slow  # on these meshes test_transformer runs by default
@pytest.mark.parametrize("mesh", [*AUTO["Flux.1"], "sp=8"])
def test_the_picture_of_dev_on_what_auto_takes(mesh: str) -> None:
    assert psnr(picture(opened("dev", mesh)), expected("dev")) >= SAME


@pytest.mark.slow  # by default: test_wan.py; guidance, seed and shift change a picture below
@pytest.mark.parametrize("variant", ["dev", pytest.param("schnell", marks=pytest.mark.slow)])
def test_the_comparison_would_see_another_request(variant: str) -> None:
    pipeline = opened(variant)
    assert_wrong_ones_differ(
        expected(variant),
        SAME - 30,
        prompt=picture(pipeline, "a red circle moving right"),
        seed=picture(pipeline, seed=8),
        shift=picture(pipeline, flow_shift=1.1),
        **({"guidance": picture(pipeline, guidance_scale=3.9)} if variant == "dev" else {}),
    )


@pytest.mark.thorough  # by default: that of dev, above
@pytest.mark.parametrize(
    ("mesh", "height", "width"),
    [
        ("single", 48, 80),
        *(
            # What schnell lacks of dev is an input; the meshes are those of dev's test.
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("single", 64, 64), ("dp=2,tp=4", 48, 80), ("dp=2,sp=4", 64, 64)]
        ),
    ],
)
def test_the_picture_of_schnell_is_that_of_diffusers(mesh: str, height: int, width: int) -> None:
    reference = expected("schnell", height=height, width=width)
    assert psnr(picture(opened("schnell", mesh), height=height, width=width), reference) >= SAME


@pytest.mark.thorough  # by default: those of Wan, tests/pipeline/test_video.py
@pytest.mark.parametrize("variant", ["dev", pytest.param("schnell", marks=pytest.mark.slow)])
def test_another_scheduler(variant: str) -> None:
    actual = picture(opened(variant), scheduler="unipc")
    assert psnr(actual, expected(variant, "unipc")) >= SAME
    assert psnr(actual, expected(variant, "unipc")) > psnr(actual, expected(variant)) + 20


@pytest.mark.slow
def test_several_pictures_at_once() -> None:
    """One on each half of the mesh."""
    actual = picture(opened("dev", "dp=2,tp=4"), num_videos=2)
    assert actual.shape[0] == 2
    assert psnr(actual, expected("dev", num_videos=2)) >= SAME


def test_dev_reads_its_guidance_and_one_program_does_for_all_numbers() -> None:
    pipeline = opened("dev")
    first = picture(pipeline)
    with count_compilations() as count:
        assert torch.equal(picture(pipeline), first)
        assert not torch.equal(picture(pipeline, seed=8), first)
        guided = picture(pipeline, guidance_scale=2.0)
        assert not torch.equal(picture(pipeline, flow_shift=2.0), first)
        assert torch.equal(picture(pipeline, guidance_scale=2.0), guided)
    assert count.requested == 0, "neither a seed nor a number compiles anything"
    assert psnr(guided, first) < 100
    assert psnr(guided, expected("dev", guidance_scale=2.0)) >= SAME


@pytest.mark.thorough  # by default: it has no place for it, test_flux_lora.py
def test_schnell_says_that_guidance_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = opened("schnell")
    plain = picture(pipeline, guidance_scale=0.0)
    assert "no effect" not in caplog.text
    assert torch.equal(picture(pipeline, guidance_scale=3.0, negative_prompt="blue"), plain)
    assert "guidance_scale=3.0 has no effect: Flux.1 schnell was distilled to do without guidance" in caplog.text
    assert "negative_prompt=blue has no effect: Flux.1 schnell has no branch for a negative prompt" in caplog.text


def test_sizes_of_the_family() -> None:
    assert (FLUX_DEV.card.defaults.num_inference_steps, FLUX_DEV.card.defaults.guidance_scale) == (28, 3.5)
    assert (FLUX_SCHNELL.card.defaults.num_inference_steps, FLUX_SCHNELL.card.defaults.max_sequence_length) == (4, 256)
    assert opened("dev").family is FLUX_DEV
    assert opened("schnell").family is FLUX_SCHNELL


def test_sigmas_are_those_of_diffusers() -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    for size, steps in ((1024, 28), (512, 4)):
        settings = GenerationSettings(height=size, width=size, num_inference_steps=steps, flow_shift=1.0)
        reference = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        sigmas = np.linspace(1.0, 1 / steps, steps)
        reference.set_timesteps(sigmas=sigmas, mu=calculate_shift((size // 16) ** 2))
        found = make_schedule(FLUX_DEV.scheduling.factories["euler"](settings))
        np.testing.assert_allclose(found.sigmas, reference.sigmas[:-1].numpy(), rtol=1e-6)
        plain = make_schedule(FLUX_SCHNELL.scheduling.factories["euler"](settings))
        np.testing.assert_allclose(plain.sigmas, sigmas, rtol=1e-6)


@pytest.mark.default_cases("sp=2,tp=4-False-8-dtype1")
@pytest.mark.parametrize(
    ("mesh", "scan", "text_tokens", "dtype"),
    [
        pytest.param("single", False, 7, torch.float32, marks=pytest.mark.slow),  # by default: pictures of dev
        ("sp=2,tp=4", False, 8, torch.float32),
        ("dp=2,sp=4", True, 7, torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("tp=8", True, 7, torch.float32),
                ("single", True, 7, torch.float32),
                ("single", True, 8, torch.bfloat16),
                ("dp=2,tp=4", True, 7, torch.float32),
                ("dp=2,sp=4", True, 7, torch.float32),
                ("dp=2,sp=4", True, 8, torch.float32),
                ("sp=2,tp=4", True, 8, torch.bfloat16),
            ]
        ),
    ],
)
def test_transformer(mesh: str, scan: bool, text_tokens: int, dtype: torch.dtype) -> None:
    latents = torch.randn(2, 4, 1, 8, 16, generator=torch.Generator().manual_seed(1))
    text = torch.randn(2, text_tokens, 16, generator=torch.Generator().manual_seed(2))
    pooled = torch.randn(2, 24, generator=torch.Generator().manual_seed(3))
    reference = small_flux.reference("dev")
    wanted = reference.transformer(
        reference._pack_latents(latents[:, :, 0], 2, 4, 8, 16),
        text,
        pooled,
        round_timestep(torch.tensor([700.0, 700.0]), dtype) / 1000,  # as diffusers in this dtype
        reference._prepare_latent_image_ids(2, 4, 8, "cpu", torch.float32),
        torch.zeros(text_tokens, 3),
        round_guidance(torch.tensor([3.5, 3.5]), dtype) / 1000,
        return_dict=False,
    )[0]
    transformer, weights = component(opened("dev"), flux_transformer.TRANSFORMER, mesh, dtype, scan=scan)
    prepared = transformer.program(flux_transformer.prepare)(weights, pooled=pooled, text=text)
    axes = dict.fromkeys(("latents", "pooled", "text"), ("dp",))
    velocity = transformer.program(flux_transformer.predict, input_axes=axes)(
        weights, latents=latents, timestep=torch.tensor([700.0]), guidance_scale=torch.tensor(3.5), **prepared
    )
    wanted = reference._unpack_latents(wanted, 64, 128, 8).unsqueeze(2)
    assert relative_error(to_host(velocity), wanted) <= (1e-4 if dtype == torch.float32 else 2e-2)


# By default: int8 in test_flux2.py, fp8 in tests/compiler/test_quantization.py.
@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "least"), [("fp8", 57), ("int8", 72)])
def test_quantized_products(quantize: Any, least: float) -> None:
    """60 and 76 dB are found."""
    exact = picture(opened("dev"))
    pipeline = VideoPipeline.open(small_flux.directory("dev"), RuntimeConfig(mesh="dp=2,tp=4", quantize=quantize))
    assert least <= psnr(picture(pipeline), exact) < 80
    assert_wrong_ones_differ(
        exact,
        least - 5,
        prompt=picture(pipeline, "a blue circle moving right"),
        seed=picture(pipeline, seed=8),
        guidance=picture(pipeline, guidance_scale=3.9),
    )


@covering(
    "mesh, scan",
    ["single", "dp=2,tp=4", "sp=8"],
    [True, False],
    strength=0,
    always=[("dp=2,tp=4", True)],  # one device and sp by default: the pictures of dev
)
def test_text_encoders(mesh: str, scan: bool) -> None:
    reference = small_flux.reference("dev")
    text, pooled, _ = reference.encode_prompt(PROMPT, max_sequence_length=19)
    for encoder, wanted in zip(FLUX_DEV.text.encoders, (pooled, text), strict=True):
        tokenizer = reference.tokenizer if encoder.length else reference.tokenizer_2
        ids = tokenizer(PROMPT, padding="max_length", max_length=encoder.length or 19, return_tensors="pt").input_ids
        found, weights = component(opened("dev"), encoder.component, mesh, scan=scan)
        (actual,) = found.program(encoder.encode)(weights, input_ids=ids, attention_mask=torch.ones_like(ids)).values()
        assert relative_error(to_host(actual), wanted) <= 1e-4


def copy_of(variant: str, path: Path) -> Path:
    shutil.copytree(small_flux.directory(variant), path)
    return path


def test_clip_under_the_names_of_published_checkpoints(tmp_path: Path) -> None:
    directory = copy_of("dev", tmp_path / "model")
    (file,) = (directory / "text_encoder").glob("*.safetensors")
    save_file({f"text_model.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"))
    settings = pipeline.settings(**CHOSEN)
    ours, known = (p.encode(PROMPT, settings).positive for p in (pipeline, opened("dev")))
    assert torch.equal(ours["pooled"], known["pooled"])


def test_latents_as_tokens_and_back() -> None:
    latents = torch.randn(2, 16, 1, 6, 10)
    reference = small_flux.reference("dev")
    tokens = patches.as_tokens(latents)
    assert torch.equal(tokens, reference._pack_latents(latents, 2, 16, 6, 10))
    assert torch.equal(patches.as_latents(tokens, 6, 10), latents)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"height": 100}, "height=100 is not divisible by 16; use 96 or 112"),
        ({"width": 4096}, "width=4096 is outside 16 to 2048"),
        ({"num_frames": 5}, "num_frames=5 is for videos and this model makes images; use 1"),
        ({"num_frames": 0}, "num_frames=0 is for videos"),
        ({"scheduler": "heun"}, "scheduler='heun' is unknown; choose from euler, unipc, dpm++"),
        ({"max_sequence_length": 513}, "max_sequence_length=513 is not allowed"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        opened("dev").settings(**chosen)
    assert message in str(caught.value)


def edited(directory: Path, file: str, **changes: Any) -> None:
    path = directory / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_wrong_directories(tmp_path: Path) -> None:
    directory = copy_of("dev", tmp_path / "lacks")
    shutil.rmtree(directory / "text_encoder_2")
    shutil.rmtree(directory / "tokenizer_2")
    with pytest.raises(
        CheckpointError, match=r"lacks text_encoder_2, tokenizer_2; a FluxPipeline directory has text_e"
    ):
        VideoPipeline.open(directory, RuntimeConfig(mesh="single"))

    directory = copy_of("dev", tmp_path / "other")
    edited(directory, "model_index.json", _class_name="FluxFillPipeline")
    with pytest.raises(UnsupportedError, match=r"is a FluxFillPipeline; supported are .*Flux.1 dev \(FluxPipeline\)"):
        VideoPipeline.open(directory, RuntimeConfig(mesh="single"))

    directory = copy_of("dev", tmp_path / "vae")
    edited(directory, "vae/config.json", _class_name="AutoencoderTiny")
    with pytest.raises(
        CheckpointError, match=r"describes a AutoencoderTiny, expected AutoencoderKL; this is not a Flux"
    ):
        VideoPipeline.open(directory, RuntimeConfig(mesh="single"))

    directory = copy_of("dev", tmp_path / "newer")
    edited(directory, "transformer/config.json", thinking=True)
    with pytest.raises(UnsupportedError, match="has thinking, which FluxTransformer2DModel of diffusers"):
        VideoPipeline.open(directory, RuntimeConfig(mesh="single"))
    VideoPipeline.open(directory, RuntimeConfig(mesh="single", ignored_config_keys=("thinking",)))

    directory = copy_of("dev", tmp_path / "damaged")
    edited(directory, "transformer/config.json", num_layers="many")
    with pytest.raises(CheckpointError, match="num_layers='many', expected a whole number"):
        VideoPipeline.open(directory, RuntimeConfig(mesh="single"))


def test_embeddings_of_another_model() -> None:
    pipeline = opened("dev")
    settings = pipeline.settings(**CHOSEN)
    embeddings = pipeline.encode(PROMPT, settings)
    wide = {**embeddings.positive, "pooled": torch.zeros(1, 768)}
    with pytest.raises(
        InvalidValueError, match="have pooled 768, text 16 features, this model wants pooled 24, text 16"
    ):
        pipeline.denoise(type(embeddings)(PROMPT, wide, None), settings)


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as opened_file:
        return np.array(opened_file)


@pytest.mark.slow  # by default: tests/cli/test_demo.py
def test_the_command_writes_a_picture(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = ("--model", str(small_flux.directory("dev")), "--mesh", "single")
    size = ("--height", "48", "--width", "80", "--steps", "4", "--seed", "7")
    assert cli.main(["generate", PROMPT, *model, *size]) == 0
    assert capsys.readouterr().out == "image.png\n"
    assert pixels("image.png").shape == (48, 80, 3)
    metadata = media.read_metadata("image.png")
    assert (metadata["prompt"], metadata["seed"]) == (PROMPT, "7")
    assert cli.main(["encode", PROMPT, *model, *size]) == 0
    assert cli.main(["denoise", "text.safetensors", "--mesh", "single"]) == 0
    assert cli.main(["decode", "latents.safetensors", "--mesh", "single"]) == 0
    assert np.array_equal(pixels("latents.png"), pixels("image.png"))
    assert cli.main(["generate", PROMPT, *model, "--num-frames", "5"]) == 1
    assert "--num-frames 5 is for videos and this model makes images; use 1" in capsys.readouterr().err


@pytest.mark.slow  # by default: that of Flux.2 dev, with the same kinds of blocks
def test_flux_dev_lowers_for_eight_chips() -> None:
    seen = measure_lowering(lower_flux.lower_programs, 1024, 1024)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == 8
        assert program["megabytes"] < 5, "no table was worked out on the host"
    step = programs["denoise_step"]
    assert step["kernels"] == 2, "splash once in each kind of block"
    assert step["loops"] == 2, "both lists of blocks are scanned"
    assert step["outputs"] == [[1, 16, 1, 128, 128]] * 6
    assert programs["prepare"]["outputs"] == [[1, 3072], [1, 512, 3072]]
    assert programs["encode_pooled"]["outputs"] == [[1, 768]]
    assert programs["encode_text"]["outputs"] == [[1, 512, 4096]]
    assert programs["encode_pooled"]["loops"] == programs["encode_text"]["loops"] == 1
    assert programs["decode_frame"]["outputs"] == [[1, 1, 1024, 1024, 3]]
    assert_bounded_work(seen, operators=1_200)


def photograph(path: Path) -> Path:
    rows, columns = np.mgrid[0:120, 0:160]
    colours = np.stack((rows * 2, columns, (rows * columns) % 256), axis=-1).astype(np.uint8)
    Image.fromarray(colours).save(path)
    return path


@pytest.mark.thorough  # by default: a video to begin with, test_wan_video_to_video.py
@pytest.mark.parametrize(
    ("variant", "strength", "mesh", "size"),
    [
        ("dev", 0.6, "single", (48, 80)),
        pytest.param("dev", 0.6, "dp=2,tp=4", (48, 80), marks=pytest.mark.slow),
        pytest.param("dev", 0.6, "dp=2,sp=4", (64, 64), marks=pytest.mark.slow),
        pytest.param("schnell", 0.9, "dp=2,tp=4", (48, 80), marks=pytest.mark.slow),
    ],
)
def test_from_a_picture_as_diffusers_does_it(
    tmp_path: Path, variant: str, strength: float, mesh: str, size: tuple[int, int]
) -> None:
    chosen = CHOSEN | {"height": size[0], "width": size[1]}
    parts = {name: part for name, part in small_flux.reference(variant).components.items() if part is not None}
    reference = FluxImg2ImgPipeline(**parts)
    reference.set_progress_bar_config(disable=True)
    file = photograph(tmp_path / "photograph.png")
    with Image.open(file) as image:
        wanted = reference(
            PROMPT,
            image=image.convert("RGB"),
            strength=strength,
            num_images_per_prompt=2,
            generator=torch.Generator().manual_seed(CHOSEN["seed"]),
            output_type="pt",
            **{name: value for name, value in chosen.items() if name != "seed"},
        ).images.permute(0, 2, 3, 1)
    pipeline = opened(variant, mesh)
    settings = pipeline.settings(**chosen, num_videos=2)
    given = GivenMedia((read_image(file),), strength=strength)
    latents = pipeline.denoise(pipeline.encode(PROMPT, settings, given), settings)
    (actual,) = pipeline.decode(latents, settings)
    assert psnr(actual[:, 0], wanted) >= SAME
    assert psnr(actual[:, 0], picture(pipeline, num_videos=2, height=size[0], width=size[1])) < 40, (
        "the image has its part in it"
    )


@pytest.mark.slow
def test_the_command_starts_from_a_picture(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    photograph(tmp_path / "photograph.png")
    command = ["generate", PROMPT, "--model", str(small_flux.directory("dev")), "--mesh", "single"]
    command += ["--height", "48", "--width", "80", "--steps", "4"]
    assert cli.main([*command, "--image", "photograph.png", "--strength", "0.5"]) == 0
    metadata = media.read_metadata("image.png")
    assert metadata["strength"] == "0.5"
    assert len(metadata["pictures"]) == 16, "the fingerprint of what it shows"
    for more, message in [
        (["--image", "photograph.png", "--strength", "0"], "--strength 0.0 is not a number over 0, up to 1"),
        (["--image", "photograph.png", "--strength", "some"], "--strength 'some' is not a number over 0, up to 1"),
        (["--strength", "0.5"], "--strength 0.5 is for an image or a video that denoising starts from; give one"),
        (["--image", "none.png"], "--image none.png is not a file; give an image such as first.png"),
    ]:
        assert cli.main([*command, *more]) == 1
        assert message in capsys.readouterr().err
    given = ["--image", "photograph.png", "--strength", "0.5"]
    assert cli.main(["encode", *command[1:], *given]) == 0
    assert cli.main(["denoise", "text.safetensors", "--seed", "1"]) == 1
    assert "whose image was encoded with seed=" in capsys.readouterr().err
    assert cli.main(["denoise", "text.safetensors", "--mesh", "single"]) == 0
    assert cli.main(["decode", "latents.safetensors", "-o", "staged.png", "--mesh", "single"]) == 0
    with Image.open("image.png") as whole, Image.open("staged.png") as staged:
        assert np.array_equal(np.asarray(whole), np.asarray(staged)), "the stages hand on what generate has at once"
    capsys.readouterr()
    assert cli.main(["generate", PROMPT, "--model", "demo", "--mesh", "single", "--image", "photograph.png"]) == 1
    assert "--image is given, but model demo begins with a prompt alone; leave it out" in capsys.readouterr().err
