"""Flux.2 against diffusers' own pipelines, across meshes, sizes and stages."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.flux2 import text as flux2_text
from comfy_tpu.families.flux2 import transformer as flux2_transformer
from comfy_tpu.families.flux2.model import FLUX2_DEV, FLUX2_KLEIN, FLUX2_KLEIN_BASE
from comfy_tpu.families.shared.timesteps import round_guidance, round_timestep
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.schedule import make_schedule
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import lower_flux2, small_flux2
from tests.families.meshes import AUTO, MESHES
from tests.families.pieces import component
from tests.lowering import assert_bounded_work, measure_lowering
from tests.tracing import relative_error

PROMPT = "a red circle moving left"
# 15 tokens, which nothing divides, and 16, which lie evenly on any mesh; the text has 40.
SIZES = [(48, 80), (64, 64)]
CHOSEN: dict[str, Any] = {
    "height": 48,
    "width": 80,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "max_sequence_length": 40,
    "seed": 7,
}
VARIANTS = ["klein", "base", "dev"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def opened(variant: str, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(small_flux2.directory(variant), RuntimeConfig(mesh=mesh))


def picture(pipeline: VideoPipeline, prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    return torch.cat(list(pipeline.generate(prompt, pipeline.settings(**(CHOSEN | changed)))), dim=1)[:, 0]


@functools.cache
def expected(variant: str, num_videos: int = 1, **changed: Any) -> torch.Tensor:
    chosen = {name: value for name, value in (CHOSEN | changed).items() if name != "seed"}
    images = small_flux2.reference(variant)(
        prompt=PROMPT,
        **chosen,
        num_images_per_prompt=num_videos,
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
    ).images
    return images.permute(0, 2, 3, 1)


@pytest.mark.default_cases("base-dp=2,tp=4-size9")
@covering(
    "variant, mesh, size",
    VARIANTS,
    MESHES,
    SIZES,
    strength=0,
    # base has two branches for dp to divide. One device with this size is what other tests run, too.
    always=[("dev", "single", (48, 80)), ("base", "dp=2,tp=4", (64, 64))],  # klein is base without the branches
)
def test_the_picture_is_that_of_diffusers(variant: str, mesh: str, size: tuple[int, int]) -> None:
    height, width = size
    reference = expected(variant, height=height, width=width)
    assert reference.std() > 0.05, "the reference shows something"
    assert psnr(picture(opened(variant, mesh), height=height, width=width), reference) >= SAME


@pytest.mark.parametrize(
    ("variant", "mesh"),
    [pytest.param(variant, mesh, marks=pytest.mark.slow) for variant in ("dev", "klein") for mesh in AUTO["Flux.2"]],
)  # on these meshes test_transformer runs by default
def test_the_picture_on_what_auto_takes(variant: str, mesh: str) -> None:
    assert psnr(picture(opened(variant, mesh)), expected(variant)) >= SAME


@pytest.mark.slow
@covering("variant", VARIANTS, strength=0, always=[("base",)])
def test_the_comparison_would_see_another_request(variant: str) -> None:
    pipeline = opened(variant)
    wrong = {"prompt": picture(pipeline, "a red circle moving right"), "seed": picture(pipeline, seed=8)}
    if variant != "klein":
        wrong["guidance"] = picture(pipeline, guidance_scale=3.9)
    if variant == "base":
        wrong["negative"] = picture(pipeline, negative_prompt="blue")
    assert_wrong_ones_differ(expected(variant), SAME - 15, **wrong)


@pytest.mark.slow
def test_several_pictures_at_once() -> None:
    actual = picture(opened("base"), num_videos=2)
    assert actual.shape[0] == 2
    assert psnr(actual, expected("base", num_videos=2)) >= SAME
    assert psnr(actual[:1], actual[1:]) < 40


@pytest.mark.thorough  # by default: that of Flux.1 dev, test_flux.py
def test_dev_reads_its_guidance_and_one_program_does_for_all_numbers() -> None:
    pipeline = opened("dev")
    first = picture(pipeline)
    with count_compilations() as count:
        assert not torch.equal(picture(pipeline, seed=8), first)
        guided = picture(pipeline, guidance_scale=2.0)
    assert count.requested == 0, "neither a seed nor a number compiles anything"
    assert psnr(guided, first) < 100
    assert psnr(guided, expected("dev", guidance_scale=2.0)) >= SAME


@pytest.mark.slow
def test_klein_base_has_two_branches() -> None:
    pipeline = opened("base")
    guided = picture(pipeline)
    assert psnr(picture(pipeline, guidance_scale=1.0), expected("base", guidance_scale=1.0)) >= SAME
    assert psnr(picture(pipeline, guidance_scale=1.0), guided) < 60
    assert not torch.equal(picture(pipeline, negative_prompt="blue background"), guided)


@pytest.mark.slow
def test_klein_says_that_guidance_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = opened("klein")
    plain = picture(pipeline, guidance_scale=1.0)
    assert "no effect" not in caplog.text
    assert torch.equal(picture(pipeline, guidance_scale=3.0), plain)
    assert "guidance_scale=3.0 has no effect: Flux.2 klein was distilled to do without guidance" in caplog.text


def test_which_family_a_directory_is_of() -> None:
    assert opened("dev").family is FLUX2_DEV
    assert opened("klein").family is FLUX2_KLEIN
    assert opened("base").family is FLUX2_KLEIN_BASE
    assert opened("klein").defaults.num_inference_steps == 4
    assert opened("base").defaults.guidance_scale == 4.0


def test_sigmas_are_those_of_diffusers() -> None:
    for size, steps in ((1024, 50), (512, 4), (2048, 28)):
        settings = GenerationSettings(height=size, width=size, num_inference_steps=steps, flow_shift=1.0)
        reference = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        mu = compute_empirical_mu(image_seq_len=(size // 16) ** 2, num_steps=steps)
        reference.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        found = make_schedule(FLUX2_DEV.scheduling.factories["euler"](settings))
        np.testing.assert_allclose(found.sigmas, reference.sigmas[:-1].numpy(), rtol=1e-6)


@pytest.mark.default_cases("sp=2,tp=4-False-8-dtype2")
@pytest.mark.parametrize(
    ("mesh", "scan", "text_tokens", "dtype"),
    [
        pytest.param("single", False, 7, torch.float32, marks=pytest.mark.slow),  # by default: pictures of dev
        ("dp=2,sp=4", True, 7, torch.bfloat16),
        ("sp=2,tp=4", False, 8, torch.float32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("tp=8", True, 8, torch.float32),
                ("single", True, 7, torch.float32),
                ("single", True, 8, torch.bfloat16),
                ("dp=2,sp=4", True, 7, torch.float32),
                ("sp=2,tp=4", True, 8, torch.float32),
            ]
        ),
    ],
)
def test_transformer(mesh: str, scan: bool, text_tokens: int, dtype: torch.dtype) -> None:
    latents = torch.randn(2, 16, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    text = torch.randn(2, text_tokens, 48, generator=torch.Generator().manual_seed(2))
    reference = small_flux2.reference("dev")
    wanted = reference.transformer(
        hidden_states=reference._pack_latents(latents[:, :, 0]),
        encoder_hidden_states=text,
        timestep=round_timestep(torch.tensor([700.0, 700.0]), dtype) / 1000,  # as diffusers in this dtype
        img_ids=reference._prepare_latent_ids(latents[:, :, 0]),
        txt_ids=reference._prepare_text_ids(text),
        guidance=round_guidance(torch.tensor([3.5, 3.5]), dtype) / 1000,
        return_dict=False,
    )[0]
    transformer, weights = component(opened("dev"), flux2_transformer.TRANSFORMER, mesh, dtype, scan=scan)
    prepared = transformer.program(flux2_transformer.prepare)(weights, text=text)
    velocity = transformer.program(flux2_transformer.predict, input_axes=dict.fromkeys(("latents", "text"), ("dp",)))(
        weights, latents=latents, timestep=torch.tensor([700.0]), guidance_scale=torch.tensor(3.5), **prepared
    )
    wanted = wanted.transpose(1, 2).reshape(latents.shape)
    assert relative_error(to_host(velocity), wanted) <= (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.slow  # by default: test_flux.py
@pytest.mark.parametrize(("quantize", "least"), [("fp8", 69), ("int8", 79)])
def test_quantized_products(quantize: Any, least: float) -> None:
    """72 and 82 dB are found, and 75 where the prompt is another: a seed and a guidance must be seen."""
    pipeline = VideoPipeline.open(small_flux2.directory("dev"), RuntimeConfig(mesh="dp=2,tp=4", quantize=quantize))
    assert least <= psnr(picture(pipeline), expected("dev")) < SAME
    assert_wrong_ones_differ(
        expected("dev"), least - 5, seed=picture(pipeline, seed=8), guidance=picture(pipeline, guidance_scale=3.9)
    )


@covering(
    "variant, mesh, scan",
    ["klein", "dev"],
    ["single", "dp=2,tp=4", "sp=8"],
    [True, False],
    strength=0,
    # One device by default: the picture of dev.
    always=[("klein", "dp=2,tp=4", True)],
)
def test_text_encoder(variant: str, mesh: str, scan: bool) -> None:
    pipeline, reference = opened(variant), small_flux2.reference(variant)
    prompts = [PROMPT, "blue"]
    wanted, _ = reference.encode_prompt(prompts, max_sequence_length=43)
    (encoder,) = pipeline.family.text.encoders
    assert encoder.tokenize is not None
    tokens = encoder.tokenize(pipeline.files.tokenizer("tokenizer"), prompts, 43)
    assert 0 < int(tokens["attention_mask"].sum(1).min()) < 43, "there is some filling, which is read too"
    found, weights = component(opened(variant), encoder.component, mesh, scan=scan)
    actual = to_host(found.program(encoder.encode)(weights, **tokens)["text"])
    assert relative_error(actual, wanted) <= 1e-4


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_names_of_published_text_encoders(prefix: str) -> None:
    rename = flux2_text.MISTRAL.rename
    assert rename is not None
    assert rename(f"{prefix}embed_tokens.weight") == "embed_tokens.weight"
    assert rename(f"{prefix}layers.29.mlp.up_proj.weight") == "parts.2.9.mlp.up_proj.weight"
    assert rename(f"{prefix}layers.30.mlp.up_proj.weight") == "layers.30.mlp.up_proj.weight"
    assert rename("vision_tower.layers.0.x") == "vision_tower.layers.0.x"


def test_text_encoders_that_are_not_those_of_flux2() -> None:
    with pytest.raises(CheckpointError, match=r"num_hidden_layers=27, expected a whole number over 27"):
        flux2_text.QWEN.build({**small_flux2.QWEN, "num_hidden_layers": 27})
    with pytest.raises(UnsupportedError, match="attends to a sliding window"):
        flux2_text.QWEN.build({**small_flux2.QWEN, "use_sliding_window": True})
    with pytest.raises(CheckpointError, match="has no text_config"):
        flux2_text.MISTRAL.build({})


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"height": 100}, "height=100 is not divisible by 16; use 96 or 112"),
        ({"width": 4096}, "width=4096 is outside 16 to 2048"),
        ({"num_frames": 5}, "num_frames=5 is for videos and this model makes images; use 1"),
        ({"scheduler": "heun"}, "scheduler='heun' is unknown; choose from euler, unipc, dpm++"),
        ({"max_sequence_length": 513}, "max_sequence_length=513 is not allowed"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        opened("klein").settings(**chosen)
    assert message in str(caught.value)


def test_it_does_not_start_from_a_picture() -> None:
    pipeline = opened("klein")
    given = GivenMedia((Image.new("RGB", (80, 48)),), strength=0.5)
    with pytest.raises(InvalidValueError, match=r"strength=0\.5 is for an image or a video that denoising starts from"):
        pipeline.encode_media(given, pipeline.settings(**CHOSEN))


@pytest.mark.thorough  # by default: test_full_size.py
@pytest.mark.parametrize(
    "model", [pytest.param("black-forest-labs/FLUX.2-klein-4B", marks=pytest.mark.slow), "black-forest-labs/FLUX.2-dev"]
)
def test_full_size_models_lower_for_eight_chips(model: str) -> None:
    seen = measure_lowering(lower_flux2.lower_programs, model, 1024, 1024)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == 8
        assert program["megabytes"] < 5, "no table was worked out on the host"
    step = programs["denoise_step"]
    assert step["kernels"] == 2, "splash once in each kind of block"
    assert step["loops"] == 2, "both lists of blocks are scanned"
    assert step["outputs"] == [[1, 128, 1, 64, 64]] * 6
    hidden, features = (6144, 15360) if model.endswith("dev") else (3072, 7680)
    assert programs["prepare"]["outputs"] == [[1, 512, hidden]]
    assert programs["encode_text"]["outputs"] == [[1, 512, features]]
    assert programs["encode_text"]["loops"] == 3
    assert programs["decode_frame"]["outputs"] == [[1, 1, 1024, 1024, 3]]
    assert_bounded_work(seen, operators=1_500)
