"""LTX-Video against diffusers' own pipelines: whole videos, masks, shifts, frame rates, the VAE, full size."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx import pipeline_ltx, pipeline_ltx_image2video
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import MESH_AXES, MeshSizes, RuntimeConfig, ShardingConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.ltx_video import model as ltx_model
from comfy_tpu.families.ltx_video import transformer as ltx_transformer
from comfy_tpu.families.ltx_video import vae as ltx_vae
from comfy_tpu.families.shared import all_frames_vae
from comfy_tpu.families.shared import terminal_shift_schedulers as ltx_schedulers
from comfy_tpu.parallel.layouts import _weight_bytes
from comfy_tpu.parallel.mesh import abstract_placement, make_placement
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.counted_work import published_work
from tests.families import lower_ltx, small_ltx
from tests.families.meshes import AUTO, on_every_mesh
from tests.lowering import assert_bounded_work, measure_lowering
from tests.tracing import relative_error

LONG, SHORT = "a red circle moving left on a black background", "blue"
SIZES = {"96x64x17": (LONG, 96, 64, 17), "64x32x9": (SHORT, 64, 32, 9)}
NEGATIVE = "left"


@functools.cache
def opened(mesh: str, *, conditioned: bool = False) -> VideoPipeline:
    return VideoPipeline.open(small_ltx.directory(conditioned=conditioned), RuntimeConfig(mesh=mesh))


def settings(pipeline: VideoPipeline, size: str, **changed: Any) -> Any:
    _, width, height, frames = SIZES[size]
    chosen = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": 3, "seed": 7}
    chosen |= {"negative_prompt": NEGATIVE, "max_sequence_length": small_ltx.TEXT_TOKENS}
    return pipeline.settings(**(chosen | changed))


def video(pipeline: VideoPipeline, size: str, prompt: str | None = None, images: Any = (), **changed: Any) -> Any:
    frames = pipeline.generate(prompt or SIZES[size][0], settings(pipeline, size, **changed), images)
    return torch.cat(list(frames), dim=1)


def by_diffusers(size: str, pipeline: Any = None, **changed: Any) -> torch.Tensor:
    prompt, width, height, frames = SIZES[size]
    made = (pipeline or small_ltx.reference())(
        **{
            "prompt": prompt,
            "negative_prompt": NEGATIVE,
            "height": height,
            "width": width,
            "num_frames": frames,
            "num_inference_steps": 3,
            "max_sequence_length": small_ltx.TEXT_TOKENS,
            "generator": torch.Generator().manual_seed(7),
            "output_type": "pt",
            **changed,
        }
    ).frames
    return made.permute(0, 1, 3, 4, 2)


expected = functools.cache(by_diffusers)


@on_every_mesh("size", SIZES)
def test_the_video_is_that_of_diffusers_on_every_mesh(mesh: str, size: str) -> None:
    assert expected(size).std() > 0.05, "the reference shows something"
    assert psnr(video(opened(mesh), size), expected(size)) >= SAME


@pytest.mark.slow  # on this mesh test_transformer_with_masks runs by default
@pytest.mark.parametrize("mesh", AUTO["LTX-Video"])
def test_the_video_on_what_auto_takes(mesh: str) -> None:
    assert psnr(video(opened(mesh), "64x32x9"), expected("64x32x9")) >= SAME


@pytest.mark.slow  # by default: test_wan.py
def test_the_comparison_would_see_another_request() -> None:
    pipeline, size = opened("single"), "64x32x9"
    assert_wrong_ones_differ(
        expected(size),
        SAME - 30,
        prompt=video(pipeline, size, "red"),
        negative=video(pipeline, size, negative_prompt="right"),
        seed=video(pipeline, size, seed=8),
        guidance=video(pipeline, size, guidance_scale=2.9),
    )


@pytest.mark.thorough  # by default: the video and its programs, above
def test_other_frame_rates_are_other_videos_and_no_other_program() -> None:
    pipeline = opened("single")
    video(pipeline, "64x32x9")
    with count_compilations() as count:
        slower = video(pipeline, "64x32x9", fps=8)
    assert count.requested == 0
    assert psnr(slower, by_diffusers("64x32x9", frame_rate=8)) >= SAME
    assert psnr(slower, expected("64x32x9")) < 60, "which the comparison above would see"


def test_one_compilation_for_every_prompt_of_a_size() -> None:
    pipeline = opened("single")
    video(pipeline, "64x32x9")
    with count_compilations() as count:
        video(pipeline, "64x32x9", LONG)
        video(pipeline, "64x32x9", SHORT, negative_prompt="", seed=8, guidance_scale=4.0, flow_shift=2.0)
    assert count.requested == 0


def picture() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8)
    return Image.fromarray(values)


@functools.cache
def from_a_picture(size: str) -> torch.Tensor:
    """diffusers draws a sample of the image's latents; here its middle is taken."""
    sampled = pipeline_ltx_image2video.retrieve_latents
    pipeline_ltx_image2video.retrieve_latents = lambda output, generator: sampled(output, generator, "argmax")
    try:
        return by_diffusers(size, small_ltx.image_reference(), image=picture())
    finally:
        pipeline_ltx_image2video.retrieve_latents = sampled


@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        pytest.param("single", "64x32x9", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=4", "96x64x17", marks=pytest.mark.slow),
        pytest.param("dp=2,sp=4", "96x64x17", marks=pytest.mark.slow),
        ("dp=2,sp=4", "64x32x9"),  # fewer latent columns than devices
    ],
)
def test_a_video_from_a_first_frame_is_that_of_diffusers(mesh: str, size: str) -> None:
    wanted = from_a_picture(size)
    assert psnr(video(opened(mesh), size, images=[picture()]), wanted) >= SAME
    assert psnr(wanted, expected(size)) < 40, "the image has an effect"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [pytest.param("single", marks=pytest.mark.slow), "dp=2,sp=4"])
def test_a_decoder_that_takes_noise_away_is_told_that_there_is_none(mesh: str) -> None:
    wanted = by_diffusers("64x32x9", small_ltx.reference(conditioned=True))
    assert wanted.std() > 0.05
    assert psnr(video(opened(mesh, conditioned=True), "64x32x9"), wanted) >= SAME


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (dict(small_ltx.scheduler().config), (64, 96, 17)),
        (dict(small_ltx.scheduler(shift_terminal=None, time_shift_type="linear").config), (64, 96, 17)),
        (dict(small_ltx.scheduler(use_dynamic_shifting=False, shift=3.0).config), (64, 96, 17)),
        (ltx_schedulers._SCHEDULER, (512, 704, 161)),
        (ltx_schedulers._SCHEDULER, (256, 256, 9)),
    ],
    ids=["small", "linear", "static", "published", "published, few tokens"],
)
def test_steps_are_those_of_diffusers(config: Any, size: tuple[int, int, int]) -> None:
    height, width, frames = size
    chosen = dataclasses.replace(
        ltx_model.LTX_VIDEO.card.defaults, height=height, width=width, num_frames=frames, num_inference_steps=5
    )
    wanted = small_ltx.FlowMatchEulerDiscreteScheduler.from_config(config)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = pipeline_ltx.calculate_shift(ltx_schedulers.token_count(chosen), *(wanted.config[name] for name in names))
    wanted.set_timesteps(sigmas=np.linspace(1.0, 0.2, 5), mu=mu)
    made = ltx_schedulers.own_schedulers(lambda name: config)["euler"](chosen)
    assert torch.allclose(made.timesteps, wanted.timesteps, rtol=1e-6)
    assert torch.allclose(made.sigmas, wanted.sigmas, rtol=1e-6)


def test_the_model_directory_says_how_steps_are_shifted(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(small_ltx.directory(), path)
    chosen = settings(opened("single"), "64x32x9")
    file = path / "scheduler" / "scheduler_config.json"
    last = []
    for changed in ({}, {"base_shift": 0.1}, {"shift_terminal": 0.3}):
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
        last.append(ModelFiles.open(path).schedulers["euler"](chosen).timesteps[1:].tolist())
    assert last[0] != last[1] != last[2]
    file.write_text(json.dumps({"_class_name": "LCMScheduler"}))
    with pytest.raises(UnsupportedError, match="describes a LCMScheduler, expected a FlowMatchEulerDiscreteScheduler"):
        VideoPipeline.open(path, RuntimeConfig(mesh="single")).plan(chosen)
    shutil.rmtree(path / "scheduler")
    assert ModelFiles.open(path).schedulers["euler"] is ltx_schedulers.SCHEDULERS["euler"]


@pytest.mark.slow
def test_every_solver_makes_a_video() -> None:
    chosen = {"num_inference_steps": 30, "guidance_scale": 1.0}
    pipeline, size = opened("single"), "64x32x9"
    euler = video(pipeline, size, **chosen)
    for scheduler in ("unipc", "dpm++"):
        made = video(pipeline, size, **chosen, scheduler=scheduler)
        assert psnr(made, euler) > 48, "of the same equation; 52 and 54 are found"
    assert_wrong_ones_differ(
        euler, 42, prompt=video(pipeline, size, LONG, **chosen), seed=video(pipeline, size, **chosen, seed=8)
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


@functools.cache
def transformer_case(lengths: tuple[int, int] = (7, 3)) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Texts of different lengths; 45 video tokens, which nothing divides."""
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).float()
    inputs = {
        "latents": random(2, 6, 3, 3, 5),
        "timestep": torch.tensor([437.5]),
        "text": random(2, 7, small_ltx.TEXT),
        "text_mask": mask.unsqueeze(-1),
        "frame_rate": torch.full((2, 1), 24.0),
    }
    answer = small_ltx.transformer().reference(
        pipeline_ltx.LTXPipeline._pack_latents(inputs["latents"]),
        inputs["text"],
        inputs["timestep"].expand(2),
        mask,
        num_frames=3,
        height=3,
        width=5,
        rope_interpolation_scale=(8 / 24, 32, 32),
        return_dict=False,
    )[0]
    return inputs, pipeline_ltx.LTXPipeline._unpack_latents(answer, 3, 3, 5)


def answered(mesh: str, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """As the pipeline does it: what `prepare` says of the prompt is given to `predict`, in part as weights."""
    model = small_ltx.transformer()
    sharding = ShardingConfig(gather_min_bytes=0)
    options = {"dtype": torch.float32, "sharding": sharding} | options
    component = Component(model.spec, model.config, make_placement(mesh), **options)
    weights = component.load(Checkpoint.open(model.checkpoint))
    rows = {name: inputs[name] for name in ("text", "text_mask", "frame_rate")}
    prepare = component.program(
        ltx_transformer.prepare, input_axes=dict.fromkeys(rows, ("dp",)), output_axes=ltx_transformer.PROMPT_AXES
    )
    prepared = prepare(weights, **rows)
    predict = component.program(ltx_transformer.predict, input_axes={"latents": ("dp",), "text_visible": ("dp",)})
    return to_host(
        predict(
            {**weights, **{name: array for name, array in prepared.items() if "." in name}},
            latents=inputs["latents"],
            timestep=inputs["timestep"],
            guidance_scale=inputs["timestep"],
            **{name: array for name, array in prepared.items() if "." not in name},
        )
    )


@pytest.mark.parametrize(
    "mesh",
    ["dp=2,sp=2,tp=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("tp=8", "sp=8", "dp=2,sp=4"))],
)
def test_transformer_with_masks(mesh: str) -> None:
    inputs, answer = transformer_case()
    assert relative_error(answered(mesh, inputs), answer) <= 1e-4


def unrolled(module: Any, latents: torch.Tensor, timestep: torch.Tensor, **rows: torch.Tensor) -> torch.Tensor:
    for block in module.transformer_blocks:
        context = module.caption_projection(rows["text"])
        block.attn2.prompt_key, block.attn2.prompt_value = ltx_transformer.keys_and_values(block.attn2, context)
    visible, frame_rate = rows["text_mask"].squeeze(-1) > 0, rows["frame_rate"][:1]
    return ltx_transformer.predict(module, latents, timestep, timestep, visible, frame_rate)


def test_blocks_that_are_not_scanned_say_the_same() -> None:
    (inputs, answer), model = transformer_case(), small_ltx.transformer()
    component = Component(model.spec, model.config, make_placement("single"), dtype=torch.float32, scan=False)
    weights = component.load(Checkpoint.open(model.checkpoint))
    assert relative_error(to_host(component.program(unrolled)(weights, **inputs)), answer) <= 1e-4


@pytest.mark.thorough  # by default: that of Wan, tests/parity
def test_transformer_in_bfloat16() -> None:
    inputs, answer = transformer_case()
    assert relative_error(answered("dp=2,sp=4", inputs, dtype=torch.bfloat16), answer) <= 2e-2


@pytest.mark.slow  # by default: test_transformer_with_masks, whose tokens are filled
def test_filling_takes_no_part() -> None:
    """Whatever stands in hidden tokens, every bit of the answer is the same; and it matters that they are hidden."""
    inputs, answer = transformer_case()
    filled = torch.where(inputs["text_mask"] > 0, inputs["text"], 50.0 * random(2, 7, small_ltx.TEXT))
    assert torch.equal(answered("single", inputs), answered("single", inputs | {"text": filled}))
    shown = inputs | {"text_mask": torch.ones(2, 7, 1)}
    assert relative_error(answered("single", shown), answer) > 1e-3


@pytest.mark.parametrize(
    ("mesh", "sides"),
    [
        pytest.param("single", (3, 5), marks=pytest.mark.slow),
        ("dp=2,sp=4", (3, 13)),
        pytest.param("dp=2,tp=4", (2, 3), marks=pytest.mark.slow),
    ],
)
def test_all_frames_are_decoded_together(mesh: str, sides: tuple[int, int]) -> None:
    """Also where the columns do not divide, as 22 at the published size, and where there are fewer than devices."""
    model, latents = small_ltx.vae(), random(1, 6, 3, *sides)
    vae = model.reference
    mean, deviation = (x.view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
    wanted = vae.decode(latents * deviation / vae.config.scaling_factor + mean, return_dict=False)[0]
    component = Component(model.spec, model.config, make_placement(mesh), dtype=torch.float32)
    program = component.program(all_frames_vae.decode_frame, input_axes={"latent": (None, None, None, None, MESH_AXES)})
    frames, _ = program(component.load(Checkpoint.open(model.checkpoint)), latent=latents, cache=None)
    assert frames.shape[1] == 17
    assert relative_error(to_host(frames), wanted.clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1)) <= 1e-4


@pytest.mark.slow
def test_full_size_lowers_for_eight_chips() -> None:
    seen = measure_lowering(lower_ltx.lower_programs, 1216, 704, 257)
    assert_bounded_work(seen, operators=4_000)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == 8
        assert program["megabytes"] < 1, "nothing of the size of a sequence was worked out on the host"
        assert program["sequences in one array"] <= 1, "no scores of all tokens by all tokens"
    for name in ("denoise_step", "denoise_step from an image"):
        assert programs[name]["kernels"] == 1, "28 blocks are one scanned block"
        assert programs[name]["loops"] == 1
        assert programs[name]["outputs"] == [[1, 128, 33, 22, 38]] * 6
    assert programs["encode_text"]["outputs"] == [[2, 128, 4096], [2, 128, 1]]
    assert programs["decode_frame"]["outputs"] == [[1, 257, 704, 1216, 3]]
    assert programs["encode_frames"]["outputs"] == [[1, 128, 1, 22, 38]]


@pytest.mark.parametrize("sizes", [MeshSizes(dp=2, sp=4), MeshSizes(dp=2, tp=4), MeshSizes(sp=2, tp=4)], ids=str)
def test_the_workload_counts_the_weights_of_the_published_model(sizes: MeshSizes) -> None:
    config = ltx_model.LTX_VIDEO.card.published["Lightricks/LTX-Video"]
    component = Component(
        ltx_transformer.TRANSFORMER, config, abstract_placement(sizes, platform="tpu", chip="v6e"), dtype=torch.bfloat16
    )
    # Biases are counted whole, also those that follow their columns over tp.
    counted = _weight_bytes(published_work("LTX-Video"), sizes)
    assert counted == pytest.approx(sum(slot.bytes_per_device for slot in component.slots), rel=3e-3)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"height": 80}, "height=80 is not divisible by 32; use 64 or 96"),
        ({"width": 16}, "width=16 is outside 32 to 2048"),
        ({"num_frames": 13}, r"num_frames=13 is not 8n\+1; use 9 or 17"),
        ({"fps": 0}, "fps=0 is not allowed"),
        ({"scheduler": "lms"}, "scheduler='lms' is unknown; choose from euler, unipc"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        settings(opened("single"), "64x32x9", **chosen)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(small_ltx.directory(), path)
    shutil.rmtree(path / "text_encoder")
    with pytest.raises(CheckpointError, match="lacks text_encoder; a LTXPipeline directory has text_encoder, transf"):
        ModelFiles.open(path)


def test_what_is_not_understood_is_refused() -> None:
    placement = make_placement("single")

    def build(spec: Any, config: Any) -> None:
        Component(spec, config, placement, dtype=torch.float32)

    with pytest.raises(UnsupportedError, match=r"adds random noise while it decodes .*; use LTX-Video 0\.9\.0"):
        build(ltx_vae.VAE, {**small_ltx.VAE, "decoder_inject_noise": (True, True, True, False, False)})
    with pytest.raises(UnsupportedError, match="16 × 16 pixels and 4 frames to a latent, expected 32 × 32 and 8"):
        build(ltx_vae.VAE, {**small_ltx.VAE, "spatio_temporal_scaling": (True, True, False, False)})
    with pytest.raises(UnsupportedError, match="takes patches of 1 × 2 × 2 latents"):
        build(ltx_transformer.TRANSFORMER, {**small_ltx.transformer().config, "patch_size": 2})


def test_the_schedule_of_a_directory_is_part_of_the_model(tmp_path: Path) -> None:
    """What was made by one schedule is not gone on with by another; other families do not read the file."""
    for made, reads in ((small_ltx.directory(), True), (DEMO_DIRECTORY, False)):
        directory = tmp_path / made.name
        shutil.copytree(made, directory)
        before = ModelFiles.open(directory).fingerprint
        file = directory / "scheduler" / "scheduler_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "shift_terminal": 0.2}))
        assert (ModelFiles.open(directory).fingerprint != before) == reads
