"""Qwen-Image against diffusers' own pipeline, across meshes, sizes and stages."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageImg2ImgPipeline

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, MeshSizes, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.model_family import GuidanceInputs
from comfy_tpu.families.qwen_image import text as qwen_text
from comfy_tpu.families.qwen_image import transformer as qwen_transformer
from comfy_tpu.families.qwen_image.model import QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS
from comfy_tpu.families.qwen_image.reference import predict as predict_with_diffusers
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.schedule import make_schedule
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import lower_qwen_image, small_qwen_image
from tests.families.meshes import AUTO, MESHES
from tests.families.pieces import component
from tests.families.wan_pipelines import picture as random_picture
from tests.lowering import assert_bounded_work, measure_lowering
from tests.tracing import relative_error

PROMPT = "a red circle moving left"
# 15 tokens, which nothing divides, and 32.
SIZES = [(48, 80), (64, 128)]
CHOSEN: dict[str, Any] = {
    "height": 48,
    "width": 80,
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "negative_prompt": "blue",
    "max_sequence_length": 40,
    "seed": 7,
}


@functools.cache
def opened(variant: str, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(small_qwen_image.directory(variant), RuntimeConfig(mesh=mesh))


def picture(pipeline: VideoPipeline, prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    return torch.cat(list(pipeline.generate(prompt, pipeline.settings(**(CHOSEN | changed)))), dim=1)[:, 0]


@functools.cache
def expected(prompt: str = PROMPT, num_videos: int = 1, **changed: Any) -> torch.Tensor:
    chosen = {name: value for name, value in (CHOSEN | changed).items() if name not in ("seed", "guidance_scale")}
    images = small_qwen_image.reference("image")(
        prompt=prompt,
        true_cfg_scale=changed.get("guidance_scale", CHOSEN["guidance_scale"]),
        **chosen,
        num_images_per_prompt=num_videos,
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
    ).images
    return images.permute(0, 2, 3, 1)


@covering(
    "mesh, size",
    [*MESHES, *AUTO["Qwen-Image"]],
    SIZES,
    strength=0,
    always=[("dp=2,tp=4", (48, 80))],  # one device: test_one_program_does_for_prompts_of_all_lengths
)
def test_the_picture_is_that_of_diffusers(mesh: str, size: tuple[int, int]) -> None:
    """The two prompts are of other lengths."""
    reference = expected(height=size[0], width=size[1])
    assert reference.std() > 0.05, "the reference shows something"
    assert psnr(picture(opened("image", mesh), height=size[0], width=size[1]), reference) >= SAME


@pytest.mark.slow
def test_the_comparison_would_see_another_request() -> None:
    pipeline = opened("image")
    wrong = {
        "prompt": picture(pipeline, PROMPT.replace("left", "right")),
        "seed": picture(pipeline, seed=8),
        "negative": picture(pipeline, negative_prompt="black"),
        "guidance": picture(pipeline, guidance_scale=3.9),
        "shift": picture(pipeline, flow_shift=1.1),
    }
    assert_wrong_ones_differ(expected(), SAME - 10, **wrong)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["single", "dp=2,tp=4"])
def test_several_pictures_at_once(mesh: str) -> None:
    actual = picture(opened("image", mesh), num_videos=2)
    assert psnr(actual, expected(num_videos=2)) >= SAME
    assert psnr(actual[:1], actual[1:]) < 40


def test_one_program_does_for_prompts_of_all_lengths() -> None:
    pipeline = opened("image")
    assert psnr(picture(pipeline), expected()) >= SAME
    with count_compilations() as count:
        short = picture(pipeline, "a")
        weaker = picture(pipeline, guidance_scale=2.0)
    assert count.requested == 0, "neither a prompt nor a number compiles anything"
    assert psnr(short, expected("a")) >= SAME
    assert psnr(weaker, expected(guidance_scale=2.0)) >= SAME


@pytest.mark.slow
def test_without_guidance_one_branch_is_computed() -> None:
    actual = picture(opened("image"), guidance_scale=1.0)
    assert psnr(actual, expected(guidance_scale=1.0)) >= SAME
    assert psnr(actual, expected()) < 60


def test_guidance_keeps_the_norm_of_every_token() -> None:
    generator = torch.Generator().manual_seed(1)
    positive, negative = torch.randn(2, 3, 4, 1, 2, 6, generator=generator)
    guided = qwen_transformer.guide(
        (positive, negative), GuidanceInputs(torch.tensor(4.0), positive, torch.ones(1), {})
    )

    def tokens(x: torch.Tensor) -> torch.Tensor:
        """[batch, 3 tokens, 16], by hand: two rows and two columns of all channels."""
        return torch.stack([x[:, :, 0, :, n : n + 2].flatten(1) for n in (0, 2, 4)], dim=1)

    plain = tokens(negative + 4.0 * (positive - negative))
    wanted = plain * (tokens(positive).norm(dim=-1, keepdim=True) / plain.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(tokens(guided), wanted)


def test_which_model_a_directory_is_of() -> None:
    families = {"image": QWEN_IMAGE, "edit": QWEN_IMAGE_EDIT, "plus": QWEN_IMAGE_EDIT_PLUS}
    assert {variant: opened(variant).family for variant in families} == families
    assert [opened(variant).defaults.num_inference_steps for variant in families] == [50, 50, 40]


@pytest.mark.parametrize(("height", "width", "steps"), [(1328, 1328, 50), (512, 768, 8)])
def test_sigmas_are_those_of_diffusers(height: int, width: int, steps: int) -> None:
    reference: Any = FlowMatchEulerDiscreteScheduler.from_config(small_qwen_image.reference("image").scheduler.config)
    tokens = (height // 16) * (width // 16)
    mu = 0.5 + (0.9 - 0.5) / (8192 - 256) * (tokens - 256)
    reference.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    settings = GenerationSettings(height=height, width=width, num_inference_steps=steps, flow_shift=1.0)
    for factories in (QWEN_IMAGE.scheduling.factories, opened("image").files.schedulers):
        found = make_schedule(factories["euler"](settings))
        np.testing.assert_allclose(found.sigmas, reference.sigmas[:-1].numpy(), rtol=1e-5)


@pytest.mark.slow  # pictures are compared by default
@pytest.mark.parametrize(
    ("variant", "mesh", "scan", "dtype"),
    [
        ("image", "single", False, torch.float32),
        ("image", "dp=2,sp=4", True, torch.bfloat16),
        ("image", "dp=2,tp=4", False, torch.float32),
        ("2511", "dp=2,sp=4", True, torch.float32),
        ("2511", "single", True, torch.bfloat16),
    ],
)
def test_transformer(variant: str, mesh: str, scan: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    latents, rows = torch.randn(2, 4, 1, 6, 10, generator=generator), torch.randn(2, 40, 48, generator=generator)
    rows[0, 33:], rows[1, 5:] = 0, 0
    given = {} if variant == "image" else {"reference_1": torch.randn(2, 4, 1, 8, 4, generator=generator)}
    module = small_qwen_image.reference(variant).transformer
    scale, settings = torch.tensor(0.0), opened(variant).settings(**CHOSEN)
    wanted = predict_with_diffusers(module, latents, torch.tensor([700.0]), scale, settings, rows, **given)
    made, weights = component(opened(variant), qwen_transformer.TRANSFORMER, mesh, dtype, scan=scan)
    prepared = made.program(qwen_transformer.prepare)(weights, text=rows, **given)
    assert to_host(prepared["text_count"]).tolist() == [33, 5]
    velocity = made.program(qwen_transformer.predict, input_axes=dict.fromkeys(("latents", "text"), ("dp",)))(
        weights, latents=latents, timestep=torch.tensor([700.0]), guidance_scale=scale, **prepared
    )
    assert relative_error(to_host(velocity), wanted) <= (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.slow  # pictures are compared by default
@pytest.mark.parametrize("mesh", ["single", "dp=2,tp=4"])
@pytest.mark.parametrize("scan", [True, False])
def test_text_encoder(mesh: str, scan: bool) -> None:
    pipeline, prompts = opened("image"), [" ".join([PROMPT] * 9), "blue"]
    wanted, _ = small_qwen_image.reference("image").encode_prompt(list(prompts), max_sequence_length=43)
    (encoder,) = pipeline.family.text.encoders
    assert encoder.tokenize is not None
    tokens = encoder.tokenize(pipeline.files.tokenizer("tokenizer"), prompts, 43)
    found, weights = component(pipeline, encoder.component, mesh, scan=scan)
    actual = to_host(found.program(encoder.encode)(weights, **tokens)["text"])
    count = len(("blue", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"))
    assert relative_error(actual[0], wanted[0]) <= 1e-4
    assert relative_error(actual[1, :count], wanted[1, :count]) <= 1e-4
    assert not actual[1, count:].any()


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.6, 0.9])
def test_from_a_picture_as_diffusers_does_it(strength: float) -> None:
    image, reference, pipeline = random_picture(1, 80, 48), small_qwen_image.reference("image"), opened("image")
    given = QwenImageImg2ImgPipeline(**reference.components)
    given.set_progress_bar_config(disable=True)
    wanted = given(
        PROMPT,
        image=image,
        strength=strength,
        true_cfg_scale=CHOSEN["guidance_scale"],
        **{name: CHOSEN[name] for name in CHOSEN if name not in ("seed", "guidance_scale")},
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    ).images.permute(0, 2, 3, 1)
    settings = pipeline.settings(**CHOSEN)
    latents = pipeline.denoise(pipeline.encode(PROMPT, settings, GivenMedia((image,), strength=strength)), settings)
    actual = torch.cat(list(pipeline.decode(latents, settings)), dim=1)[:, 0]
    assert psnr(actual, wanted) >= SAME
    assert psnr(actual, expected()) < 40


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"height": 100}, "height=100 is not divisible by 16; use 96 or 112"),
        ({"width": 2064}, "width=2064 is outside 16 to 2048"),
        ({"num_frames": 5}, "num_frames=5 is for videos and this model makes images; use 1"),
        ({"max_sequence_length": 1025}, "max_sequence_length=1025 is not allowed"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        opened("image").settings(**chosen)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["use_additional_t_cond", "use_layer3d_rope", "guidance_embeds"])
def test_transformers_that_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the transformer has {name}, as Qwen-Image-Layered or a distilled"):
        qwen_transformer.TRANSFORMER.build({**small_qwen_image.TRANSFORMER, name: True})


def test_text_encoders_that_are_refused() -> None:
    build, config = qwen_text.EDIT_TEXT_ENCODER.build, small_qwen_image.QWEN_VL
    with pytest.raises(CheckpointError, match="has no vision_config; download the model again"):
        build({**config, "vision_config": None})
    with pytest.raises(CheckpointError, match="has a text_config that is no object"):
        build({**config, "text_config": 7})
    other = {**config["vision_config"], "fullatt_block_indexes": [3, 15]}
    with pytest.raises(UnsupportedError, match=r"sees whole images in blocks \[3, 15\] of 16, expected each 8th one"):
        build({**config, "vision_config": other})


@pytest.mark.thorough  # by default: test_full_size.py
@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("Qwen-Image", "v6e"),
        pytest.param("Qwen-Image", "v5p", marks=pytest.mark.slow),
        pytest.param("Qwen-Image-Edit", "v6e", marks=pytest.mark.slow),
        pytest.param("Qwen-Image-Edit", "v5p", marks=pytest.mark.slow),
        pytest.param("Qwen-Image-Edit-2511", "v6e", marks=pytest.mark.slow),
        pytest.param("Qwen-Image-Edit-2511", "v5p", marks=pytest.mark.slow),
    ],
)
def test_full_size_models_lower(name: str, chip: str) -> None:
    """On what `auto` takes, with one image where the model sees images."""
    sizes = MeshSizes(dp=2, tp=4 if chip == "v6e" else 2)  # v6e-8, and v5p-8 of four chips
    seen = measure_lowering(lower_qwen_image.lower_programs, f"Qwen/{name}", chip, sizes)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == sizes.dp * sizes.tp
        assert program["megabytes"] < 5, "no table was worked out on the host"
    step = programs["denoise_step"]
    assert step["kernels"] == 1, "splash once"
    assert step["outputs"] == [[1, 16, 1, 128, 128]] * 6
    text = {"Qwen-Image": 512, "Qwen-Image-Edit": 1888, "Qwen-Image-Edit-2511": 736}[name]
    assert programs["encode_text"]["outputs"] == [[1, text, 3584]]
    assert programs["encode_text"]["loops"] == (1 if name == "Qwen-Image" else 2), "the vision model is scanned, too"
    # It sees 6,400 patches of Edit's image at once. Shorter attention is dense.
    assert programs["encode_text"]["kernels"] == (1 if name == "Qwen-Image-Edit" else 0)
    assert programs["decode_frame"]["outputs"] == [[1, 1, 1024, 1024, 3]]
    if name != "Qwen-Image":
        assert programs["encode_frames"]["outputs"][0] == [1, 16, 1, 128, 128]
    assert_bounded_work(seen, operators=3_900)
