"""Wan 2.1 from images and Wan 2.2 against diffusers' pipelines, on one device and over meshes."""

import functools
import shutil
from typing import Any

import pytest
import torch

from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import ResidencyConfig, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import wan_pipelines
from tests.families.meshes import AUTO, MESHES, SINGLE
from tests.families.wan_pipelines import KINDS, picture
from tests.pipeline.test_video import PROMPT

CHOSEN: dict[str, Any] = {
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "flow_shift": 3.0,
    "seed": 7,
    "negative_prompt": "blue background",
}
PICTURES = {
    "2.2": 0,
    "2.2 image": 2,
    "2.1 image": 1,
    "2.1 first and last": 2,
    "5B": 0,
    "5B image": 1,
}


@functools.cache
def opened(kind: str, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(wan_pipelines.directory(kind), RuntimeConfig(mesh=mesh))


def text_tokens(kind: str) -> int:
    """512 as the models have are half of a test's time. diffusers takes all but the last 512 tokens for an image's."""
    return 512 if kind.startswith("2.1") else 32


def chosen(kind: str, **changed: Any) -> dict[str, Any]:
    own = {"guidance_scale_2": 2.5} if kind.startswith("2.2") else {}
    return CHOSEN | own | {"max_sequence_length": text_tokens(kind)} | changed


def video(
    kind: str, mesh: str = "single", pictures: int | None = None, prompt: str = PROMPT, **changed: Any
) -> torch.Tensor:
    pipeline = opened(kind, mesh)
    images = [picture(seed) for seed in range(PICTURES[kind] if pictures is None else pictures)]
    return torch.cat(list(pipeline.generate(prompt, pipeline.settings(**chosen(kind, **changed)), images)), dim=1)


@functools.cache
def expected(kind: str, height: int = 64, width: int = 96, pictures: int | None = None) -> torch.Tensor:
    given: dict[str, Any] = {}
    pictures = PICTURES[kind] if pictures is None else pictures
    if pictures:
        given["image"] = picture(0)
    if pictures > 1:
        given["last_image"] = picture(1)
    if kind.startswith("2.2"):
        given["guidance_scale_2"] = 2.5
    return wan_pipelines.reference(kind)(
        prompt=PROMPT,
        negative_prompt=CHOSEN["negative_prompt"],
        height=height,
        width=width,
        num_frames=CHOSEN["num_frames"],
        num_inference_steps=CHOSEN["num_inference_steps"],
        guidance_scale=CHOSEN["guidance_scale"],
        generator=torch.Generator().manual_seed(CHOSEN["seed"]),
        output_type="pt",
        max_sequence_length=text_tokens(kind),
        **given,
    ).frames.permute(0, 1, 3, 4, 2)


@pytest.mark.default_cases("2.1 image-single", "2.2-single")
@covering(
    "kind, mesh",
    KINDS,
    MESHES,
    strength=0,
    # One device is what other tests run, too. Over a mesh: an image as the first frame; 2.1 without one in
    # tests/pipeline/test_video.py. The 5B without an image is below.
    always=[
        ("2.2", SINGLE),
        ("2.1 image", SINGLE),
        ("5B image", "dp=2,sp=4"),
    ],
)
def test_the_video_is_that_of_diffusers_on_every_mesh(kind: str, mesh: str) -> None:
    assert expected(kind).std() > 0.02, "the reference shows something"
    assert psnr(video(kind, mesh), expected(kind)) >= SAME


@pytest.mark.slow
@pytest.mark.parametrize("mesh", AUTO["Wan 2.2"])
@pytest.mark.parametrize("kind", ["2.2", "2.2 image"])
def test_the_video_on_what_auto_takes(kind: str, mesh: str) -> None:
    assert psnr(video(kind, mesh), expected(kind)) >= SAME


@covering("kind", KINDS, strength=0, always=[("2.2",)])
def test_the_comparison_would_see_another_request(kind: str) -> None:
    assert_wrong_ones_differ(
        expected(kind),
        SAME - 10,
        prompt=video(kind, prompt="a red circle moving right"),
        negative=video(kind, negative_prompt="red"),
        seed=video(kind, seed=8),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_another_size(kind: str, mesh: str) -> None:
    assert psnr(video(kind, mesh, height=96, width=64), expected(kind, 96, 64)) >= SAME


@pytest.mark.slow
def test_wan22_from_a_first_picture_alone() -> None:
    assert psnr(video("2.2 image", pictures=1), expected("2.2 image", pictures=1)) >= SAME
    assert psnr(expected("2.2 image", pictures=1), expected("2.2 image")) < 70, "the last one has its part in it"


@pytest.mark.thorough  # by default: the switch, test_wan_swap.py
def test_both_transformers_take_part_and_are_one_program() -> None:
    pipeline = VideoPipeline.open(
        wan_pipelines.directory("2.2"), RuntimeConfig(mesh="single"), residency=Residency(ResidencyConfig())
    )
    settings = pipeline.settings(**chosen("2.2"))
    assert {step.transformer for step in pipeline.plan(settings)} == {0, 1}
    heard: list[str] = []
    pipeline.on_progress = lambda progress: heard.append(progress.label) if progress.stage == "compiling" else None
    list(pipeline.generate(PROMPT, settings))
    assert heard.count("transformer.denoise_step at 96×64×9") == 2, "compiling and ready, once"
    assert not any("transformer_2" in what for what in heard)


def test_the_boundary_and_the_second_guidance_change_the_video_and_compile_nothing() -> None:
    first = video("2.2")
    with count_compilations() as count:
        assert not torch.equal(video("2.2", boundary=0.3), first)
        assert not torch.equal(video("2.2", guidance_scale_2=4.0), first)
        assert torch.equal(video("2.2"), first)
    assert count.requested == 0


@pytest.mark.parametrize(("boundary", "transformers"), [(1.0, [1, 1, 1, 1]), (0.8, [0, 0, 1, 1]), (0.0, [0, 0, 0, 0])])
def test_the_boundary_says_whose_step_it_is(boundary: float, transformers: list[int]) -> None:
    pipeline = opened("2.2")
    plan = pipeline.plan(pipeline.settings(**chosen("2.2", boundary=boundary)))
    assert [step.transformer for step in plan] == transformers


@pytest.mark.slow
def test_the_first_frame_of_the_5b_is_the_picture() -> None:
    with_picture, without = video("5B image"), video("5B")
    assert with_picture.shape == without.shape
    assert not torch.equal(with_picture[:, :1], without[:, :1])


def test_the_5b_needs_no_picture() -> None:
    pipeline = opened("5B image", "dp=2,sp=4")
    settings = pipeline.settings(**chosen("5B"))
    assert psnr(torch.cat(list(pipeline.generate(PROMPT, settings)), dim=1), expected("5B")) >= SAME


@pytest.mark.slow
def test_stages_hand_the_picture_on(tmp_path: Any) -> None:
    pipeline = opened("2.1 image")
    settings = pipeline.settings(**CHOSEN)
    path = tmp_path / "text.safetensors"
    artifacts.save_text(path, pipeline.encode(PROMPT, settings, [picture(0)]), settings, pipeline)
    embeddings, _ = artifacts.load_text(path, pipeline)
    latents = pipeline.denoise(embeddings, settings)
    assert torch.equal(torch.cat(list(pipeline.decode(latents, settings)), dim=1), video("2.1 image"))


@pytest.mark.parametrize(
    ("kind", "pictures", "text"),
    [
        ("2.2", 1, "image is given, but model .* begins with a prompt alone; leave it out"),
        ("2.1 image", 0, "image is missing: model .* begins with an image; give one"),
        ("2.1 image", 2, "image is given 2 times, but model .* takes a first image only"),
        ("2.1 first and last", 0, "image is missing: model .* begins with an image; give one"),
        ("2.1 first and last", 1, "last_image is missing: model .* takes a first and a last image; give both"),
        ("2.2 image", 3, "image is given 3 times, but model .* takes a first and a last image"),
    ],
)
def test_too_many_or_too_few_pictures(kind: str, pictures: int, text: str) -> None:
    pipeline = opened(kind)
    with pytest.raises(InvalidValueError, match=text):
        pipeline.encode(PROMPT, pipeline.settings(**chosen(kind)), [picture(seed) for seed in range(pictures)])


def test_the_command_says_which_picture_is_too_many(tmp_path: Any, capsys: Any) -> None:
    picture(0).save(tmp_path / "a.png")
    command = ["generate", PROMPT, "--model", str(wan_pipelines.directory("2.1 image")), "--mesh", "single"]
    given = ["--image", str(tmp_path / "a.png"), "--last-image", str(tmp_path / "a.png")]
    assert cli.main([*command, *given, "--output", str(tmp_path / "a.mp4")]) == 1
    assert "--last-image is given, but model" in capsys.readouterr().err


def test_one_frame_has_no_last_one() -> None:
    pipeline = opened("2.2 image")
    settings = pipeline.settings(**chosen("2.2 image", num_frames=1))
    with pytest.raises(InvalidValueError, match="num_frames=1 has no last frame"):
        pipeline.encode(PROMPT, settings, [picture(0), picture(1)])


@pytest.mark.default_cases("'2.1 image'-{'num_frames': 5}")
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("2.1 image", {"height": 96, "width": 64}),
        ("2.1 image", {"num_frames": 5}),
        ("5B image", {"height": 64, "width": 128}),
    ],
    ids=repr,
)
def test_a_picture_encoded_for_another_video_is_refused_by_the_next_stage(kind: str, changed: dict[str, int]) -> None:
    pipeline = opened(kind)
    embeddings = pipeline.encode(PROMPT, pipeline.settings(**chosen(kind)), [picture(0)])
    settings = pipeline.settings(**chosen(kind, **changed))
    size = f"{settings.width}×{settings.height}×{settings.num_frames}"
    with pytest.raises(InvalidValueError, match=f"the image was encoded for other sizes.*encode it for {size}"):
        pipeline.denoise(embeddings, settings)


@pytest.mark.parametrize(("kind", "how"), [("2.2", "leave it out"), ("2.2 image", "encode it with this model")])
def test_a_picture_encoded_for_another_model_is_refused_by_the_next_stage(kind: str, how: str) -> None:
    reader = opened("2.1 image")
    read = reader.encode(PROMPT, reader.settings(**CHOSEN), [picture(0)])
    pipeline = opened(kind)
    with pytest.raises(InvalidValueError, match=f"encoded for another model: .* condition, image; {how}"):
        pipeline.denoise(read, pipeline.settings(**chosen(kind)))


def test_one_picture_is_refused_by_the_next_stage_of_a_model_that_reads_two() -> None:
    reader, pipeline = opened("2.1 image"), opened("2.1 first and last")
    read = reader.encode(PROMPT, reader.settings(**CHOSEN), [picture(0)])
    with pytest.raises(InvalidValueError, match="has 5 tokens, those of a first and a last image are 10; encode"):
        pipeline.denoise(read, pipeline.settings(**CHOSEN))


def test_a_boundary_is_for_two_transformers() -> None:
    pipeline = opened("5B")
    settings = pipeline.settings(**chosen("5B", boundary=0.5))
    for stage in (lambda: pipeline.encode(PROMPT, settings), lambda: pipeline.plan(settings)):
        with pytest.raises(InvalidValueError, match=r"boundary=0\.5 is for models with two transformers"):
            stage()


def test_the_second_guidance_counts_where_there_is_a_second_transformer() -> None:
    pipeline = opened("5B")
    settings = pipeline.settings(**chosen("5B", guidance_scale=1.0, guidance_scale_2=3.0))
    assert pipeline.encode(PROMPT, settings).negative is None
    assert not any(step.guided for step in pipeline.plan(settings))


@pytest.mark.parametrize("folder", ["transformer", "transformer_2"])
def test_a_pair_with_one_transformer_missing_is_refused(tmp_path: Any, folder: str) -> None:
    shutil.copytree(wan_pipelines.directory("2.2"), tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / folder)
    with pytest.raises(CheckpointError, match=f"lacks {folder}; a WanPipeline directory has .*transformer_2"):
        VideoPipeline.open(tmp_path / "model")
