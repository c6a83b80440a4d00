"""Z-Image against diffusers' own pipelines, across meshes, sizes and stages."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageImg2ImgPipeline

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, MeshSizes, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.model_family import GuidanceInputs
from comfy_tpu.families.z_image import text as z_image_text
from comfy_tpu.families.z_image import transformer as z_image_transformer
from comfy_tpu.families.z_image.model import Z_IMAGE, Z_IMAGE_TURBO
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.schedule import make_schedule
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import lower_z_image, small_z_image
from tests.families.meshes import AUTO, MESHES
from tests.families.pieces import component
from tests.families.wan_pipelines import picture as random_picture
from tests.lowering import assert_bounded_work, measure_lowering
from tests.tracing import relative_error

# 50 tokens with the template, padded to 64; the negative prompt's 6 to 32; a program takes 96.
PROMPT = " ".join(["a red circle moving left"] * 9)
# 15 tokens, padded to 32 with learned ones, and 32.
SIZES = [(48, 80), (64, 128)]
CHOSEN: dict[str, Any] = {
    "height": 48,
    "width": 80,
    "num_inference_steps": 3,
    "guidance_scale": 0.0,
    "max_sequence_length": 72,
    "seed": 7,
}
GUIDED = {"guidance_scale": 4.0, "negative_prompt": "blue"}


@functools.cache
def opened(variant: str, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(small_z_image.directory(variant), RuntimeConfig(mesh=mesh))


def picture(pipeline: VideoPipeline, prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    return torch.cat(list(pipeline.generate(prompt, pipeline.settings(**(CHOSEN | changed)))), dim=1)[:, 0]


@functools.cache
def expected(variant: str, prompt: str = PROMPT, num_videos: int = 1, **changed: Any) -> torch.Tensor:
    chosen = {name: value for name, value in (CHOSEN | changed).items() if name != "seed"}
    images = small_z_image.reference(variant)(
        prompt=prompt,
        **chosen,
        num_images_per_prompt=num_videos,
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
    ).images
    return images.permute(0, 2, 3, 1)


@covering(
    "variant, mesh, size",
    ["turbo", "base"],
    MESHES,
    SIZES,
    strength=0,
    always=[("turbo", "single", (48, 80))],
)
def test_the_picture_is_that_of_diffusers(variant: str, mesh: str, size: tuple[int, int]) -> None:
    chosen = {"height": size[0], "width": size[1], **(GUIDED if variant == "base" else {})}
    reference = expected(variant, **chosen)
    assert reference.std() > 0.05, "the reference shows something"
    assert psnr(picture(opened(variant, mesh), **chosen), reference) >= SAME


@pytest.mark.thorough  # by default: on one device, above
@covering("mesh, size", AUTO["Z-Image"], SIZES, strength=0, always=[("dp=2,sp=2,tp=2", (64, 128))])
def test_the_picture_on_what_auto_takes(mesh: str, size: tuple[int, int]) -> None:
    """Keys go around a ring, because the number of heads is not divisible; and the two prompts are of other lengths."""
    chosen = {"height": size[0], "width": size[1], **GUIDED}
    assert psnr(picture(opened("six heads", mesh), **chosen), expected("six heads", **chosen)) >= SAME


@pytest.mark.slow
def test_the_comparison_would_see_another_request() -> None:
    pipeline = opened("base")
    chosen = {"height": 64, "width": 128, **GUIDED}
    wrong = {
        "prompt": picture(pipeline, PROMPT.replace("left", "right"), **chosen),
        "seed": picture(pipeline, **chosen | {"seed": 8}),
        "negative": picture(pipeline, **chosen | {"negative_prompt": "black"}),
        "guidance": picture(pipeline, **chosen | {"guidance_scale": 3.9}),
        "shift": picture(pipeline, **chosen, flow_shift=5.9),
        "limit": picture(pipeline, **chosen, cfg_normalization=1.0),
    }
    assert_wrong_ones_differ(expected("base", **chosen), SAME - 30, **wrong)


@pytest.mark.thorough  # by default: that of Qwen-Image, test_qwen_image.py
def test_one_program_does_for_prompts_of_all_lengths() -> None:
    pipeline = opened("turbo")
    picture(pipeline)
    with count_compilations() as count:
        short = picture(pipeline, "a red circle")
        empty = picture(pipeline, "a red circle", seed=8)
    assert count.requested == 0, "neither a prompt nor a seed compiles anything"
    assert psnr(short, expected("turbo", "a red circle")) >= SAME
    assert not torch.equal(short, empty)


@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_a_limit_on_guidance(limit: float) -> None:
    """By itself: the whole pipeline with it is slow, below."""
    generator = torch.Generator().manual_seed(1)
    positive, negative = torch.randn(2, 3, 4, 1, 2, 5, generator=generator)
    positive[1] *= 4  # one whose guided norm is far off
    wanted = []
    for one, other in zip(positive, negative, strict=True):
        guided = one + 0.3 * (one - other)
        most, norm = limit * torch.linalg.vector_norm(one), torch.linalg.vector_norm(guided)
        wanted.append(guided * (most / norm) if norm > most else guided)
    prepared = {"cfg_normalization": torch.full((1, 1), limit)}
    found = z_image_transformer.guide(
        (positive, negative), GuidanceInputs(torch.tensor(0.3), positive, torch.ones(1), prepared)
    )
    torch.testing.assert_close(found, torch.stack(wanted))
    prepared = {"cfg_normalization": torch.zeros(1, 1)}
    unlimited = z_image_transformer.guide(
        (positive, negative), GuidanceInputs(torch.tensor(0.3), positive, torch.ones(1), prepared)
    )
    torch.testing.assert_close(unlimited, positive + 0.3 * (positive - negative))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["single", "dp=2,sp=4"])
@pytest.mark.parametrize("limit", [0.7, 1.0])
def test_the_picture_with_a_limit_on_guidance(mesh: str, limit: float) -> None:
    chosen = {**GUIDED, "cfg_normalization": limit, "num_videos": 2}
    actual = picture(opened("base", mesh), **chosen)
    assert psnr(actual, expected("base", **chosen)) >= SAME
    assert psnr(actual[:1], actual[1:]) < 40


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [0.05, 0.2])
def test_guidance_that_ends_is_diffusers_truncation(truncation: float) -> None:
    """diffusers' cfg_truncation is a time, from 0, after which steps are not guided."""
    pipeline = opened("base")
    sigmas = pipeline.plan(pipeline.settings(**(CHOSEN | GUIDED))).steps
    guided = sum(1 - step.sigma <= truncation for step in sigmas)
    assert 0 < guided < 3
    actual = picture(pipeline, **GUIDED, guidance_until=guided / 3)
    assert psnr(actual, expected("base", **GUIDED, cfg_truncation=truncation)) >= SAME
    assert psnr(actual, expected("base", **GUIDED)) < 60


@pytest.mark.slow
def test_turbo_may_be_guided() -> None:
    assert psnr(picture(opened("turbo"), **GUIDED), expected("turbo", **GUIDED)) >= SAME


@pytest.mark.slow
def test_a_scheduler_whose_shift_grows_with_the_image() -> None:
    own = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
    scheduler = Z_IMAGE.scheduling.own_schedulers(lambda _: own)["euler"]
    settings = GenerationSettings(height=1024, width=512, num_inference_steps=9, flow_shift=1.0)
    reference = FlowMatchEulerDiscreteScheduler(**own)
    mu = 0.5 + (1.15 - 0.5) / (4096 - 256) * (64 * 32 - 256)
    reference.set_timesteps(sigmas=np.linspace(1.0, 1 / 9, 9), mu=mu)
    np.testing.assert_allclose(make_schedule(scheduler(settings)).sigmas, reference.sigmas[:-1].numpy(), rtol=1e-5)
    assert Z_IMAGE.scheduling.own_settings(lambda _: own) == {"flow_shift": 1.0}


def test_which_model_a_directory_is_of() -> None:
    """Their configurations are equal but for the scheduler's shift."""
    turbo, base = opened("turbo"), opened("base")
    assert turbo.family is Z_IMAGE_TURBO
    assert base.family is Z_IMAGE
    for defaults, wanted in ((turbo.defaults, (8, 0.0, 3.0)), (base.defaults, (50, 4.0, 6.0))):
        assert (defaults.num_inference_steps, defaults.guidance_scale, defaults.flow_shift) == wanted


@pytest.mark.parametrize("family", [Z_IMAGE_TURBO, Z_IMAGE], ids=lambda family: family.name)
def test_sigmas_are_those_of_diffusers(family: Any) -> None:
    reference = FlowMatchEulerDiscreteScheduler(shift=family.card.defaults.flow_shift)
    reference.set_timesteps(sigmas=torch.linspace(1.0, 1 / 8, 8).tolist())
    settings = GenerationSettings(num_inference_steps=8, flow_shift=family.card.defaults.flow_shift)
    found = make_schedule(family.scheduling.factories["euler"](settings))
    np.testing.assert_allclose(found.sigmas, reference.sigmas[:-1].numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "scan", "dtype"),
    [
        # By default: the pictures above, on one device and on what auto takes.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("single", False, torch.float32),
                ("dp=2,sp=4", True, torch.bfloat16),
                ("sp=4,tp=2", False, torch.float32),
                ("single", True, torch.bfloat16),
            ]
        ),
    ],
)
def test_transformer(mesh: str, scan: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    latents, rows = torch.randn(2, 4, 1, 6, 10, generator=generator), torch.randn(2, 40, 16, generator=generator)
    rows[0, 33:], rows[1, 5:] = 0, 0
    reference = small_z_image.reference("six heads").transformer
    captions = [rows[0, :33], rows[1, :5]]
    wanted = -torch.stack(reference(list(latents), torch.tensor([0.3, 0.3]), captions, return_dict=False)[0])
    made, weights = component(opened("six heads"), z_image_transformer.TRANSFORMER, mesh, dtype, scan=scan)
    prepared = made.program(z_image_transformer.prepare)(weights, text=rows, cfg_normalization=torch.zeros(2, 1))
    assert to_host(prepared["text_count"]).tolist() == [64, 32]
    velocity = made.program(z_image_transformer.predict, input_axes=dict.fromkeys(("latents", "text"), ("dp",)))(
        weights, latents=latents, timestep=torch.tensor([700.0]), guidance_scale=torch.tensor(0.0), **prepared
    )
    assert relative_error(to_host(velocity), wanted) <= (1e-4 if dtype == torch.float32 else 2e-2)


@covering("mesh, scan", ["single", "dp=2,tp=4"], [True, False], strength=0, always=[("single", False)])
def test_text_encoder(mesh: str, scan: bool) -> None:
    pipeline, prompts = opened("turbo"), [PROMPT, "blue"]
    wanted, _ = small_z_image.reference("turbo").encode_prompt(list(prompts), max_sequence_length=43)
    (encoder,) = pipeline.family.text.encoders
    assert encoder.tokenize is not None
    tokens = encoder.tokenize(pipeline.files.tokenizer("tokenizer"), prompts, 43)
    found, weights = component(pipeline, encoder.component, mesh, scan=scan)
    actual = to_host(found.program(encoder.encode)(weights, **tokens)["text"])
    assert [len(row) for row in wanted] == [43, 6]
    assert relative_error(actual[0], wanted[0]) <= 1e-4
    assert relative_error(actual[1, :6], wanted[1]) <= 1e-4
    assert not actual[1, 6:].any()


@pytest.mark.slow  # by default: test_flux.py, whose VAE it is
@pytest.mark.parametrize("strength", [0.6, 0.9])
def test_from_a_picture_as_diffusers_does_it(strength: float) -> None:
    image, reference, pipeline = random_picture(1, 80, 48), small_z_image.reference("turbo"), opened("turbo")
    given = ZImageImg2ImgPipeline(**reference.components)
    given.set_progress_bar_config(disable=True)
    wanted = given(
        PROMPT,
        image=image,
        strength=strength,
        **{name: CHOSEN[name] for name in ("num_inference_steps", "guidance_scale", "max_sequence_length")},
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    ).images.permute(0, 2, 3, 1)
    settings = pipeline.settings(**CHOSEN)
    latents = pipeline.denoise(pipeline.encode(PROMPT, settings, GivenMedia((image,), strength=strength)), settings)
    actual = torch.cat(list(pipeline.decode(latents, settings)), dim=1)[:, 0]
    assert psnr(actual, wanted) >= SAME
    assert psnr(actual, expected("turbo")) < 40


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"height": 100}, "height=100 is not divisible by 16; use 96 or 112"),
        ({"num_frames": 5}, "num_frames=5 is for videos and this model makes images; use 1"),
        ({"max_sequence_length": 513}, "max_sequence_length=513 is not allowed"),
        ({"cfg_normalization": -1.0}, "cfg_normalization=-1.0 is not a number from 0 to 100"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        opened("turbo").settings(**chosen)
    assert message in str(caught.value)


def test_a_limit_that_other_models_do_not_read(caplog: pytest.LogCaptureFixture) -> None:
    from comfy_tpu.pipeline.checks import warn_of_ignored
    from comfy_tpu.pipeline.model_files import ModelFiles

    for name in ("demo", str(small_z_image.directory("base"))):
        files = ModelFiles.open(name)
        chosen = dataclasses.replace(files.defaults, cfg_normalization=1)
        warn_of_ignored(files.family, files.defaults, chosen)
    assert caplog.text.count("cfg_normalization=1 has no effect: Wan 2.1 has no limit on its guidance") == 1
    assert caplog.text.count("no effect") == 1


def test_models_that_are_refused() -> None:
    build = z_image_transformer.TRANSFORMER.build
    with pytest.raises(UnsupportedError, match="reads images beside the prompt"):
        build({**small_z_image.TRANSFORMER, "siglip_feat_dim": 8})
    with pytest.raises(UnsupportedError, match="has patches of 4-1"):
        build({**small_z_image.TRANSFORMER, "all_patch_size": (4,)})
    with pytest.raises(CheckpointError, match="num_hidden_layers=1, expected a whole number over 1"):
        z_image_text.TEXT_ENCODER.build({**small_z_image.QWEN, "num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("model", "chip", "sizes"),
    [
        pytest.param("Z-Image Turbo", "v6e", MeshSizes(sp=4, tp=2), marks=pytest.mark.slow),
        pytest.param("Z-Image Turbo", "v5p", MeshSizes(sp=2, tp=2), marks=pytest.mark.slow),  # v5p-8: four chips
        # By default it is counted (test_full_size.py), and run on this mesh in small.
        pytest.param("Z-Image", "v6e", MeshSizes(dp=2, sp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("Z-Image", "v5p", MeshSizes(dp=2, tp=2), marks=pytest.mark.slow),
    ],
)
def test_full_size_models_lower(model: str, chip: str, sizes: MeshSizes) -> None:
    hub_id = f"Tongyi-MAI/{model.replace(' ', '-')}"
    seen = measure_lowering(lower_z_image.lower_programs, model, hub_id, chip, sizes)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == sizes.dp * sizes.sp * sizes.tp
        assert program["megabytes"] < 5, "no table was worked out on the host"
    rows = 2 if model == "Z-Image" else 1
    step = programs["denoise_step"]
    # Once in each kind of block; without sp, blocks of both kinds share one call.
    assert step["kernels"] == (2 if sizes.sp > 1 else 1)
    assert step["outputs"] == [[1, 16, 1, 128, 128]] * 6
    assert programs["prepare"]["outputs"][1:] == [[rows, 512, 3840], [rows], [rows, 16], [rows, 16]]
    assert programs["encode_text"]["outputs"] == [[1, 512, 2560]]
    assert programs["encode_text"]["loops"] == 1
    assert programs["decode_frame"]["outputs"] == [[1, 1, 1024, 1024, 3]]
    assert_bounded_work(seen, operators=1_600)
