"""The transformer of LTX-2 by itself against diffusers: both streams, on meshes, and each branch of guidance."""

import functools
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import ShardingConfig
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.ltx2 import transformer as ltx2_transformer
from comfy_tpu.families.shared.packed_sound import join_sound
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.step import split_prepared
from tests.families import small_ltx2
from tests.tracing import relative_error

FRAMES, HEIGHT, WIDTH, SOUND = 3, 3, 5, 17
"""45 tokens of the video and 17 of its sound, which nothing divides."""
FPS = 24.0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


def times(coordinates: torch.Tensor) -> torch.Tensor:
    return coordinates[:1, 0].mean(dim=-1)


@functools.cache
def inputs(later: bool = False) -> dict[str, torch.Tensor]:
    model: Any = small_ltx2.transformer(later=later).reference
    frames = model.rope.prepare_video_coords(1, FRAMES, 1, 1, "cpu", fps=FPS)
    sound = model.audio_rope.prepare_audio_coords(1, SOUND, "cpu")
    widths = (small_ltx2.HIDDEN, small_ltx2.AUDIO_HIDDEN) if later else (small_ltx2.TEXT, small_ltx2.TEXT)
    return {
        "video": random(2, small_ltx2.CHANNELS, FRAMES, HEIGHT, WIDTH),
        "sound": random(2, SOUND, small_ltx2.CHANNELS),
        "timestep": torch.tensor([437.5]),
        "text": random(2, 7, widths[0]),
        "audio_text": random(2, 7, widths[1]),
        "frame_times": times(frames).expand(2, -1),
        "sound_times": times(sound).expand(2, -1),
    }


@functools.cache
def answer(later: bool = False, rope_type: str = "split", image: bool = False, **options: Any) -> torch.Tensor:
    given = inputs(later)
    model: Any = small_ltx2.transformer(later=later, rope_type=rope_type).reference
    video, timestep = given["video"].flatten(2).transpose(1, 2), given["timestep"].expand(2)
    video_timestep = timestep
    if image:
        video = torch.cat((condition().flatten(2).transpose(1, 2), video[:, HEIGHT * WIDTH :]), dim=1)
        video_timestep = timestep.unsqueeze(1) * (torch.arange(video.shape[1]) >= HEIGHT * WIDTH)
    made = model(
        video,
        given["sound"],
        given["text"],
        given["audio_text"],
        video_timestep,
        timestep,
        sigma=timestep,
        encoder_attention_mask=torch.ones(2, 7),
        audio_encoder_attention_mask=torch.ones(2, 7),
        num_frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        fps=FPS,
        audio_num_frames=SOUND,
        use_cross_timestep=True,
        return_dict=False,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
    )
    return join_sound(made[0].transpose(1, 2).unflatten(2, (FRAMES, HEIGHT, WIDTH)), made[1])


def condition() -> torch.Tensor:
    return random(2, small_ltx2.CHANNELS, 1, HEIGHT, WIDTH)


def answered(
    mesh: str,
    later: bool = False,
    rope_type: str = "split",
    rows: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> torch.Tensor:
    """As the pipeline does it: what `prepare` says of the prompt is given to `predict`, in part as weights."""
    model, given = small_ltx2.transformer(later=later, rope_type=rope_type), inputs(later)
    options = {"dtype": torch.float32, "sharding": ShardingConfig(gather_min_bytes=0)} | options
    component = Component(model.spec, model.config, make_placement(mesh), **options)
    weights = component.load(Checkpoint.open(model.checkpoint))
    rows = {name: given[name] for name in ("text", "audio_text", "frame_times", "sound_times")} | (rows or {})
    prepare = component.program(
        ltx2_transformer.prepare,
        input_axes=dict.fromkeys(rows, ("dp",)),
        output_axes=ltx2_transformer.PREPARED_AXES,
    )
    prompt_weights, prepared = split_prepared(prepare(weights, **rows))
    axes = dict.fromkeys(("latents", "text", "audio_text", "condition"), ("dp",))
    predict = component.program(
        ltx2_transformer.predict, input_axes={n: axes[n] for n in axes if n in {"latents", *prepared}}
    )
    return to_host(
        predict(
            {**weights, **prompt_weights},
            latents=join_sound(given["video"], given["sound"]),
            timestep=given["timestep"],
            guidance_scale=given["timestep"],
            **prepared,
        )
    )


@pytest.mark.slow  # by default, test_ltx2.py compares both streams with diffusers after two steps
@pytest.mark.parametrize("mesh", ["dp=2,sp=2,tp=2", "dp=2,tp=4", "sp=8", "tp=8"])
def test_both_streams_are_those_of_diffusers(mesh: str) -> None:
    assert relative_error(answered(mesh), answer()) <= 1e-4


@pytest.mark.thorough  # by default: the video, test_ltx2.py
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", pytest.param("single", marks=pytest.mark.slow)])
def test_rows_of_a_batch_are_branches_of_guidance(mesh: str) -> None:
    """The first without attention between the streams, the second without self-attention in one block."""
    rows = {
        "isolated": torch.tensor([[1.0], [0.0]]),
        "perturbed": torch.tensor([[0.0], [1.0]]),
        "perturbed_block": torch.full((2, 1), 1.0),
    }
    made = answered(mesh, rows=rows)
    isolated, perturbed = answer(isolate_modalities=True), answer(spatio_temporal_guidance_blocks=(1,))
    assert relative_error(made, torch.stack((isolated[0], perturbed[1]))) <= 1e-4
    assert min(relative_error(made[row], answer()[row]) for row in range(2)) > 1e-2, "which the comparison would see"


@pytest.mark.slow
def test_a_first_frame_has_no_noise() -> None:
    assert relative_error(answered("single", rows={"condition": condition()}), answer(image=True)) <= 1e-4
    assert relative_error(answer(), answer(image=True)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["single", "dp=2,tp=4", "dp=2,sp=4"])
def test_a_prompt_that_the_timestep_modulates(mesh: str) -> None:
    assert relative_error(answered(mesh, later=True), answer(later=True)) <= 1e-4


@pytest.mark.slow
def test_neighbours_are_rotated_where_the_model_says_so() -> None:
    made = answered("dp=2,sp=4", rope_type="interleaved")
    assert relative_error(made, answer(rope_type="interleaved")) <= 1e-4
    assert relative_error(made, answer()) > 1e-3


@pytest.mark.slow
def test_transformer_in_bfloat16() -> None:
    assert relative_error(answered("dp=2,sp=4", dtype=torch.bfloat16), answer()) <= 2e-2


def unrolled(
    module: Any, video: torch.Tensor, sound: torch.Tensor, timestep: torch.Tensor, **rows: torch.Tensor
) -> Any:
    contexts = (module.caption_projection(rows["text"]), module.audio_caption_projection(rows["audio_text"]))
    for block in module.transformer_blocks:
        for attention, context in zip((block.attn2, block.audio_attn2), contexts, strict=True):
            attention.prompt_key, attention.prompt_value = ltx2_transformer.keys_and_values(attention, context)
    places = (rows["frame_times"][:1], rows["sound_times"][:1])
    return ltx2_transformer.predict(module, join_sound(video, sound), timestep, timestep, *places)


@pytest.mark.slow
def test_blocks_that_are_not_scanned_say_the_same() -> None:
    model = small_ltx2.transformer()
    component = Component(model.spec, model.config, make_placement("single"), dtype=torch.float32, scan=False)
    weights = component.load(Checkpoint.open(model.checkpoint))
    assert relative_error(to_host(component.program(unrolled)(weights, **inputs())), answer()) <= 1e-4


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"audio_patch_size": 2}, "takes patches of several latents .*audio_patch_size=2"),
        ({"audio_in_channels": 4}, "in_channels=8 and audio_in_channels=4, and every LTX-2 that was published"),
        (
            {"use_keyframes_abs_pos_embedding": True},
            r"is that of LTX-2\.5 .*; use LTX-2\.3 .* or LTX-2 ",
        ),
    ],
)
def test_what_is_not_understood_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Component(
            ltx2_transformer.TRANSFORMER,
            small_ltx2.TRANSFORMER | changed,
            make_placement("single"),
            dtype=torch.float32,
        )
