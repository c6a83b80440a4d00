"""HunyuanVideo-1.5 against diffusers' own pipeline: whole videos, masks, text encoders, the VAE, full size."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import MESH_AXES, MeshSizes, RuntimeConfig, ShardingConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.hunyuan_video import model as hunyuan_model
from comfy_tpu.families.hunyuan_video import text as hunyuan_text
from comfy_tpu.families.hunyuan_video import transformer as hunyuan_transformer
from comfy_tpu.families.hunyuan_video import vae as hunyuan_vae
from comfy_tpu.parallel.layouts import _weight_bytes
from comfy_tpu.parallel.mesh import abstract_placement, make_placement
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.counted_work import published_work
from tests.covering import covering
from tests.families import lower_hunyuan, small_hunyuan
from tests.families.meshes import MESHES, on_every_mesh
from tests.lowering import assert_bounded_work, measure_lowering
from tests.parity.small_models import SmallModel
from tests.tracing import relative_error

QUOTED = 'a red circle says "left" and “to the right” on a black background'
PLAIN = "a blue square"
SIZES = {"80x48x9": (QUOTED, 80, 48, 9), "48x32x5": (PLAIN, 48, 32, 5)}
NEGATIVE = "left"


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open(small_hunyuan.directory(), RuntimeConfig(mesh=mesh))


def settings(pipeline: VideoPipeline, size: str, **changed: Any) -> Any:
    _, width, height, frames = SIZES[size]
    chosen = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": 3, "seed": 7}
    chosen |= {"negative_prompt": NEGATIVE, "max_sequence_length": small_hunyuan.TEXT_TOKENS}
    return pipeline.settings(**(chosen | changed))


def video(pipeline: VideoPipeline, size: str, prompt: str | None = None, **changed: Any) -> torch.Tensor:
    frames = pipeline.generate(prompt or SIZES[size][0], settings(pipeline, size, **changed))
    return torch.cat(list(frames), dim=1)


@functools.cache
def expected(size: str) -> torch.Tensor:
    prompt, width, height, frames = SIZES[size]
    made = small_hunyuan.reference()(
        prompt,
        negative_prompt=NEGATIVE,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    ).frames
    return made.permute(0, 1, 3, 4, 2)


@on_every_mesh("size", SIZES)
def test_the_video_is_that_of_diffusers_on_every_mesh(mesh: str, size: str) -> None:
    assert expected(size).std() > 0.05, "the reference shows something"
    assert psnr(video(opened(mesh), size), expected(size)) >= SAME


@pytest.mark.slow
def test_the_comparison_would_see_another_request() -> None:
    pipeline, size = opened("single"), "48x32x5"
    assert_wrong_ones_differ(
        expected(size),
        SAME - 15,
        quoted=video(pipeline, size, 'a blue "square"'),
        negative=video(pipeline, size, negative_prompt="right"),
        seed=video(pipeline, size, seed=8),
    )


def test_the_model_directory_says_shift_and_guidance() -> None:
    defaults = opened("single").defaults
    assert (defaults.flow_shift, defaults.guidance_scale) == (small_hunyuan.SHIFT, small_hunyuan.GUIDANCE_SCALE)


@pytest.mark.slow
def test_one_compilation_for_every_prompt_of_a_size() -> None:
    pipeline = opened("single")
    video(pipeline, "48x32x5")
    with count_compilations() as count:
        video(pipeline, "48x32x5", 'a "red" circle')
        video(pipeline, "48x32x5", PLAIN, negative_prompt='a black background that says "no"', seed=8)
        video(pipeline, "48x32x5", PLAIN, guidance_scale=3.0, flow_shift=2.0)
    assert count.requested == 0


def run(
    model: SmallModel,
    mesh: str,
    method: Any,
    *,
    dtype: torch.dtype = torch.float32,
    scan: bool = True,
    input_axes: Any = None,
    **inputs: Any,
) -> Any:
    # Every weight is stored in pieces, however small: it is the gathering that is on trial.
    sharding = ShardingConfig(gather_min_bytes=0)
    component = Component(model.spec, model.config, make_placement(mesh), dtype=dtype, sharding=sharding, scan=scan)
    weights = component.load(Checkpoint.open(model.checkpoint))
    return to_host(component.program(method, input_axes=input_axes)(weights, **inputs))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


def forward(module: Any, latents: torch.Tensor, timestep: torch.Tensor, **embeddings: torch.Tensor) -> torch.Tensor:
    return hunyuan_transformer.predict(
        module, latents, timestep, timestep, **hunyuan_transformer.prepare(module, **embeddings)
    )


def _visible(lengths: tuple[int, ...], tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).float()


@functools.cache
def transformer_case(
    text: tuple[int, ...] = (7, 3), glyph: tuple[int, ...] = (0, 4)
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Texts of different lengths, with and without words in quotes; 45 video tokens, which nothing divides."""
    text_mask, glyph_mask = _visible(text, 7), _visible(glyph, 6)
    inputs = {
        "latents": random(2, 4, 3, 3, 5),
        "timestep": torch.tensor([437.5]),
        "text": random(2, 7, 48),
        "text_mask": text_mask.unsqueeze(-1),
        "glyph": random(2, 6, 24),
        "glyph_mask": glyph_mask.unsqueeze(-1),
    }
    answer = small_hunyuan.transformer().reference(
        torch.cat((inputs["latents"], torch.zeros(2, 5, 3, 3, 5)), dim=1),
        inputs["timestep"].expand(2),
        inputs["text"],
        text_mask,
        encoder_hidden_states_2=inputs["glyph"],
        encoder_attention_mask_2=glyph_mask,
        image_embeds=torch.zeros(2, 5, 16),
        return_dict=False,
    )[0]
    return inputs, answer


PROMPT_AXES = dict.fromkeys(("latents", "text", "text_mask", "glyph", "glyph_mask"), ("dp",))


@pytest.mark.default_cases("dp=2,tp=4-True")
@covering(
    "mesh, scan",
    [*MESHES, "tp=8", "sp=8"],
    [True, False],
    strength=0,
    always=[("single", False), ("dp=2,tp=4", True)],  # sp by default: the whole video
)
def test_transformer_with_masks(mesh: str, scan: bool) -> None:
    inputs, answer = transformer_case()
    actual = run(small_hunyuan.transformer(), mesh, forward, scan=scan, input_axes=PROMPT_AXES, **inputs)
    assert relative_error(actual, answer) <= 1e-4


@pytest.mark.slow  # by default: bfloat16 of Wan and Flux; this one in float32 above
@pytest.mark.parametrize("mesh", [pytest.param("single", marks=pytest.mark.slow), "dp=2,sp=4"])
def test_transformer_in_bfloat16(mesh: str) -> None:
    inputs, answer = transformer_case()
    model = small_hunyuan.transformer()
    actual = run(model, mesh, forward, dtype=torch.bfloat16, input_axes=PROMPT_AXES, **inputs)
    assert relative_error(actual, answer) <= 2e-2


@pytest.mark.slow  # by default: test_transformer_with_masks, whose tokens are filled
def test_filling_takes_no_part() -> None:
    """Whatever stands in hidden tokens, every bit of the answer is the same; and it matters that they are hidden."""
    inputs, answer = transformer_case()
    shown, _ = transformer_case((7, 7), (6, 6))
    filled = inputs | {
        name: torch.where(inputs[f"{name}_mask"] > 0, inputs[name], 50.0 * random(*inputs[name].shape))
        for name in ("text", "glyph")
    }
    model = small_hunyuan.transformer()
    before, after = (run(model, "single", forward, **case) for case in (inputs, filled))
    assert torch.equal(before, after)
    assert relative_error(run(model, "single", forward, **shown), answer) > 1e-2


@pytest.mark.slow
def test_more_than_one_row_and_no_second_branch() -> None:
    inputs, answer = transformer_case()
    one = {name: value if name == "timestep" else value[1:] for name, value in inputs.items()}
    actual = run(small_hunyuan.transformer(), "dp=2,sp=4", forward, input_axes=PROMPT_AXES, **one)
    assert relative_error(actual, answer[1:]) <= 1e-4


PROMPTS = [QUOTED, PLAIN, ""]


@covering("mesh, scan", MESHES, [True, False], strength=0, always=[("dp=2,tp=4", True)])  # sp: the whole video
def test_the_text_encoder_says_what_it_says_in_diffusers(mesh: str, scan: bool) -> None:
    reference = small_hunyuan.reference()
    wanted, mask = reference._get_mllm_prompt_embeds(
        reference.text_encoder, reference.tokenizer, PROMPTS, torch.device("cpu"), small_hunyuan.TEXT_TOKENS
    )
    assert mask.sum(dim=1).unique().numel() == 3, "texts of different lengths"
    tokens = hunyuan_text.tokenize_text(reference.tokenizer, PROMPTS, small_hunyuan.TEXT_TOKENS)
    actual = run(small_hunyuan.text_encoder(), mesh, hunyuan_text.encode_text, scan=scan, **tokens)
    assert torch.equal(actual["text_mask"].squeeze(-1), mask.float())
    assert relative_error(actual["text"], wanted * mask.unsqueeze(-1)) <= 1e-4


@pytest.mark.parametrize("mesh", [MESHES[0], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[1:])])
def test_words_in_quotes_are_read_as_in_diffusers(mesh: str) -> None:
    reference = small_hunyuan.reference()
    wanted, mask = reference._get_byt5_prompt_embeds(
        reference.tokenizer_2, reference.text_encoder_2, PROMPTS, torch.device("cpu")
    )
    assert [bool(row.any()) for row in mask] == [True, False, False]
    tokens = hunyuan_text.tokenize_glyphs(reference.tokenizer_2, PROMPTS, hunyuan_text.GLYPH_TOKENS)
    actual = run(small_hunyuan.glyph_encoder(), mesh, hunyuan_text.encode_glyphs, **tokens)
    assert torch.equal(actual["glyph_mask"].squeeze(-1), mask.float())
    assert relative_error(actual["glyph"], wanted * mask.unsqueeze(-1)) <= 1e-4


def test_the_template_is_that_of_diffusers() -> None:
    reference = small_hunyuan.reference()
    assert reference.system_message == hunyuan_text.SYSTEM_MESSAGE
    assert reference.prompt_template_encode_start_idx == hunyuan_text.TEMPLATE_TOKENS
    assert reference.tokenizer_2_max_length == hunyuan_text.GLYPH_TOKENS


@pytest.mark.slow  # by default: the whole video
@pytest.mark.parametrize(
    ("mesh", "sides"),
    [
        ("single", (3, 5)),
        pytest.param("dp=2,sp=4", (3, 13), marks=pytest.mark.slow),
        pytest.param("dp=2,tp=4", (2, 3), marks=pytest.mark.slow),
    ],
)
def test_frames_are_decoded_one_after_the_other_with_two_programs(mesh: str, sides: tuple[int, int]) -> None:
    """Also where the columns do not divide, as 53 at 480P, and where there are fewer than devices."""
    model, latents = small_hunyuan.vae(), random(1, 4, 4, *sides)
    scale = model.reference.config.scaling_factor
    wanted = model.reference.decode(latents / scale, return_dict=False)[0].clamp(-1, 1).add(1).div(2)
    component = Component(model.spec, model.config, make_placement(mesh), dtype=torch.float32)
    weights = component.load(Checkpoint.open(model.checkpoint))
    columns = (None, None, None, None, MESH_AXES)
    program = component.program(hunyuan_vae.decode_frame, input_axes={"latent": columns, "cache": columns})
    cache: Any = hunyuan_vae.first_cache(4)
    frames, compiled = [], []
    for index in range(4):
        with count_compilations() as count:
            part, cache = program(weights, latent=latents[:, :, index : index + 1], cache=cache)
        frames.append(to_host(part))
        compiled.append(count.requested > 0)
    assert [part.shape[1] for part in frames] == [1, 4, 4, 4]
    assert compiled == [True, True, False, False]
    assert relative_error(torch.cat(frames, dim=1), wanted.permute(0, 2, 3, 4, 1)) <= 1e-4


@pytest.mark.slow  # by default: tests/families/test_full_size.py
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (848, 480)], ids=["720P", "480P"])
def test_full_size_lowers_for_eight_chips(width: int, height: int) -> None:
    seen = measure_lowering(lower_hunyuan.lower_programs, width, height, 121)
    assert_bounded_work(seen, operators=10_000)
    programs = seen["programs"]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == 8
        assert program["megabytes"] < 1, "nothing of the size of a sequence was worked out on the host"
        assert program["sequences in one array"] <= 1, "no scores of all tokens by all tokens"
    step = programs["denoise_step"]
    assert step["kernels"] == 1, "54 blocks are one scanned block, with one attention over video and text"
    assert step["loops"] == 2, "and the two blocks that refine the text are another"
    assert step["all to all"] == 12
    assert step["outputs"] == [[1, 32, 31, height // 16, width // 16]] * 6
    assert programs["encode_text"]["outputs"] == [[2, 1000, 3584], [2, 1000, 1]]
    assert programs["encode_text"]["loops"] == 1
    assert programs["encode_glyphs"]["outputs"] == [[2, 256, 1472], [2, 256, 1]]
    caches = [programs[f"decode_frame {index}"]["outputs"][1:] for index in range(3)]
    assert caches[0] == caches[1] == caches[2], "the cache has its size from the first frame on"
    assert programs["decode_frame 0"]["outputs"][0] == [1, 1, height, width, 3]
    assert programs["decode_frame 1"]["outputs"][0] == [1, 4, height, width, 3]


@pytest.mark.thorough  # by default: tests/planning/test_counted_work.py
@pytest.mark.parametrize("sizes", [MeshSizes(dp=2, sp=2, tp=2)], ids=str)
def test_the_workload_counts_the_weights_of_the_published_model(sizes: MeshSizes) -> None:
    config = hunyuan_model.HUNYUAN15.card.published["hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v"]
    placement = abstract_placement(sizes, platform="tpu", chip="v6e")
    component = Component(hunyuan_transformer.TRANSFORMER, config, placement, dtype=torch.bfloat16)
    # Biases are counted whole, also those that follow their columns over tp.
    counted = _weight_bytes(published_work("HunyuanVideo-1.5-Diffusers-720p_t2v"), sizes)
    assert counted == pytest.approx(sum(slot.bytes_per_device for slot in component.slots), rel=3e-3)


def test_published_sizes() -> None:
    work = published_work("HunyuanVideo-1.5-Diffusers-480p_t2v")
    assert (work.tokens, work.text_tokens, work.layers, work.hidden, work.batch) == (49290, 1256, 54, 2048, 2)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"height": 40}, "height=40 is not divisible by 16; use 32 or 48"),
        ({"width": 8}, "width=8 is outside 16 to 2048"),
        ({"num_frames": 6}, r"num_frames=6 is not 4n\+1; use 5 or 9"),
        ({"max_sequence_length": 1001}, "max_sequence_length=1001 is not allowed"),
        ({"scheduler": "lms"}, "scheduler='lms' is unknown; choose from euler, unipc"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        settings(opened("single"), "48x32x5", **chosen)


@pytest.mark.parametrize("folder", ["text_encoder_2", "tokenizer_2", "vae", "tokenizer"])
def test_a_missing_folder_is_named(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(small_hunyuan.directory(), path)
    shutil.rmtree(path / folder)
    with pytest.raises(CheckpointError, match=rf"lacks {folder}; a HunyuanVideo15Pipeline directory has .*tokenizer_2"):
        ModelFiles.open(path)


@pytest.mark.parametrize(
    ("guider", "scale"),
    [
        ({"_class_name": "ClassifierFreeGuidance", "guidance_scale": 3.0}, 3.0),
        ({"_class_name": "ClassifierFreeGuidance", "guidance_scale": 3.0, "enabled": False}, 1.0),
        ({}, 6.0),
    ],
    ids=["enabled", "distilled", "none"],
)
def test_a_guider_says_the_scale(guider: dict[str, Any], scale: float) -> None:
    files = {"guider/guider_config.json": guider, "scheduler/scheduler_config.json": {"shift": 9}}
    own = hunyuan_model.own_settings(lambda name: files[name])
    assert own.get("guidance_scale", hunyuan_model.HUNYUAN15.card.defaults.guidance_scale) == scale
    assert own["flow_shift"] == 9.0


@pytest.mark.parametrize(
    "guider",
    [
        {"_class_name": "SkipLayerGuidance"},
        {"_class_name": "ClassifierFreeGuidance", "guidance_rescale": 0.5},
        {"_class_name": "ClassifierFreeGuidance", "stop": 0.5},
    ],
)
def test_other_guiders_are_refused(guider: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="supported is ClassifierFreeGuidance with a guidance_scale alone"):
        hunyuan_model.own_settings(lambda name: guider if "guider" in name else {})


def test_what_is_not_understood_is_refused() -> None:
    config, placement = small_hunyuan.transformer().config, make_placement("single")
    with pytest.raises(UnsupportedError, match="distilled with MeanFlow"):
        Component(hunyuan_transformer.TRANSFORMER, {**config, "use_meanflow": True}, placement, dtype=torch.float32)
    short = {**small_hunyuan.text_encoder().config, "num_hidden_layers": 2}
    with pytest.raises(CheckpointError, match="num_hidden_layers=2, expected a whole number over 2"):
        Component(hunyuan_text.TEXT_ENCODER, short, placement, dtype=torch.float32)
    tokenizer = small_hunyuan.tokenizer()
    tokenizer.padding_side = "left"
    with pytest.raises(CheckpointError, match="pads texts on the left"):
        hunyuan_text.tokenize_text(tokenizer, [PLAIN], small_hunyuan.TEXT_TOKENS)
