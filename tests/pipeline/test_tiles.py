"""Results whose transformer looks at tiles, against a plain loop over slices with diffusers' transformer and scheduler
in float32; for every family against its own tiles one by one; and what is refused."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import comfy_tpu
from comfy_tpu.config import RuntimeConfig, SecondPass
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.tiles import find_tiles, tile_settings
from comfy_tpu.pipeline import denoise as denoising
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.initial import initial_embeddings
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.noise import initial_noise
from comfy_tpu.pipeline.second_pass import denoise_again
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, assert_wrong_ones_differ, psnr
from tests.covering import covering
from tests.families import (
    small_animate,
    small_flux,
    small_flux2,
    small_hunyuan,
    small_hunyuan_image,
    small_ltx,
    small_ltx2,
    small_qwen_image,
    small_vace,
    small_z_image,
    wan_pipelines,
)
from tests.families.wan_pipelines import picture
from tests.pipeline import small_pipeline
from tests.pipeline.test_windows import CHOSEN, PROMPT, Blend, denoise, guide, opened, reference, settings

WIDE: dict[str, Any] = {"height": 64, "width": 112, "num_frames": 9, "tile": "48x32"}
"""8 × 14 latents, in tiles of 4 × 6 that have 1 or 2 rows in common: three by three of them."""
ROWS: Sequence[int] = (0, 2, 4)
COLUMNS: Sequence[int] = (0, 4, 8)


def _ramp(length: int, before: int, after: int) -> torch.Tensor:
    """Weights that rise over the first `before` places and fall over the last `after`."""
    weights = torch.ones(length)
    if before:
        weights[:before] *= (torch.arange(before) + 0.5) / before
    if after:
        weights[length - after :] *= (torch.arange(after, 0, -1) - 0.5) / after
    return weights


def _pieces(starts: Sequence[int], length: int) -> list[tuple[slice, torch.Tensor]]:
    pieces = []
    for number, start in enumerate(starts):
        before = starts[number - 1] + length - start if number else 0
        after = start + length - starts[number + 1] if number + 1 < len(starts) else 0
        pieces.append((slice(start, start + length), _ramp(length, before, after)))
    return pieces


def blend_tiles(
    latents: torch.Tensor, compute: Any, rows: Sequence[int], columns: Sequence[int], size: tuple[int, int]
) -> torch.Tensor:
    """`compute`: (slice of rows, slice of columns) -> the velocity there."""
    total, weight = torch.zeros_like(latents), torch.zeros(latents.shape[3:])
    for row, own_row in _pieces(rows, size[0]):
        for column, own_column in _pieces(columns, size[1]):
            ramp = own_row[:, None] * own_column
            total[..., row, column] += ramp * compute(row, column)
            weight[row, column] += ramp
    return total / weight


def _plainly(**changed: Any) -> Blend:
    made = settings(**changed)

    def blend(number: int, timestep: torch.Tensor, latents: torch.Tensor, predict: Any) -> torch.Tensor:
        def of_tile(row: slice, column: slice) -> torch.Tensor:
            part = latents[..., row, column]
            if made.num_frames == 9:
                return guide(made, predict(part, True), predict(part, False))
            shares, total = torch.tensor([1.0, 2.0, 1.0]).view(-1, 1, 1), torch.zeros_like(part)
            weight = torch.zeros(part.shape[2], 1, 1)
            for start in (0, 2, 3):  # of 6 latent frames
                window = part[:, :, start : start + 3]
                total[:, :, start : start + 3] += shares * guide(made, predict(window, True), predict(window, False))
                weight[start : start + 3] += shares
            return total / weight

        return blend_tiles(latents, of_tile, ROWS, COLUMNS, (4, 6))

    return blend


@functools.cache
def plain(**changed: Any) -> torch.Tensor:
    return reference(_plainly(**changed), **changed)


LENGTHS: tuple[dict[str, int], ...] = ({}, {"num_frames": 21})
"""Frames of one window, and of three."""


@pytest.mark.default_cases("dp=2,sp=4-length3")
@covering(
    "mesh, length",
    ("single", "dp=2,sp=4", "sp=8", "dp=8", "dp=4,sp=2", "dp=2,tp=4"),
    LENGTHS,
    strength=0,
    always=[("single", LENGTHS[0]), ("dp=2,sp=4", LENGTHS[1])],
)
def test_the_latents_are_those_of_a_plain_loop_on_every_mesh(mesh: str, length: dict[str, int]) -> None:
    assert psnr(denoise(mesh, **WIDE | length), plain(**WIDE | length)) >= SAME


def test_the_comparison_notices_other_tiles_and_prompts() -> None:
    expected = plain(**WIDE)
    wrong = {
        "whole": denoise(**WIDE | {"tile": ""}),
        "other_tiles": denoise(**WIDE | {"tile": "64x32"}),
        "other_overlap": denoise(**WIDE | {"tile_overlap": 0.6}),
        "another_prompt": denoise(prompt="a blue circle", **WIDE),
    }
    assert_wrong_ones_differ(expected, 60, **wrong)


def test_a_tile_as_large_as_the_result_changes_nothing() -> None:
    whole = denoise(**WIDE | {"tile": ""})
    for tile in ("112x64", "128x128"):
        assert torch.equal(denoise(**WIDE | {"tile": tile}), whole)


@pytest.mark.parametrize("frames", [9, 21])
def test_keyframes_have_no_effect_beside_tiles(frames: int) -> None:
    chosen = WIDE | {"num_frames": frames, "num_inference_steps": 2}
    assert torch.equal(denoise(**chosen, context_keyframes=0.5), denoise(**chosen))


def test_noise_of_windows_is_for_videos_that_have_some() -> None:
    chosen = WIDE | {"num_inference_steps": 1}
    assert torch.equal(denoise(**chosen, context_noise="freenoise"), denoise(**chosen))


def test_one_program_of_the_transformer_serves_every_size() -> None:
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    for size in ({}, {"height": 96}, {"width": 160}):
        made = pipeline.settings(**(CHOSEN | WIDE | size | {"num_inference_steps": 1}))
        pipeline.denoise(pipeline.encode(PROMPT, made), made)
    assert pipeline.running.find_program("transformer.predict_windows").compiled_count == 1


def test_the_cost_of_a_step_is_that_of_calls_with_tiles() -> None:
    files = ModelFiles.open("demo")
    made = dataclasses.replace(files.defaults, height=128, width=128, tile="64x64")
    work = files.workload(made, windows=2)
    call = files.workload(dataclasses.replace(files.defaults, num_videos=2))
    assert (work.calls, call.calls) == (5, 1), "of nine tiles"
    assert work.video_latent_bytes == 4 * files.latent_channels * 5 * 16 * 16
    assert dataclasses.replace(work, calls=1, video_latent_bytes=call.video_latent_bytes) == call


def test_a_second_pass_by_tiles_is_video_to_video_by_tiles() -> None:
    pipeline = opened()
    first = settings(**WIDE | {"height": 32, "width": 48, "tile": "48x32"})
    embeddings = pipeline.encode(PROMPT, first)
    latents = pipeline.denoise(embeddings, first)
    made, larger = denoise_again(pipeline, embeddings, latents, first, SecondPass(2.0, strength=0.7, by="pixels"))
    assert (larger.width, larger.height, larger.tile) == (96, 64, "48x32")
    frames = torch.cat(list(pipeline.decode(latents, first)), dim=1)[0]
    start = pipeline.encode_frames(frames.mul(255).round().byte().numpy(), larger)
    again = pipeline.encode(PROMPT, larger)
    shared = {**again.shared, **initial_embeddings(start, 0.7)}
    assert psnr(made, pipeline.denoise(dataclasses.replace(again, shared=shared), larger)) >= SAME
    whole = pipeline.denoise(dataclasses.replace(again, shared=shared), dataclasses.replace(larger, tile=""))
    assert psnr(made, whole) < 60


_FAMILIES: dict[str, Any] = {
    "Wan 2.2 5B": lambda: wan_pipelines.directory("5B"),
    "Wan 2.1 image-to-video": lambda: wan_pipelines.directory("2.1 image"),
    "Wan 2.2 image-to-video": lambda: wan_pipelines.directory("2.2 image"),
    "VACE": lambda: small_vace.directory(),
    "Flux.1": lambda: small_flux.directory("dev"),
    "Flux.2": lambda: small_flux2.directory("klein"),
    "LTX-Video": small_ltx.directory,
    "HunyuanVideo-1.5": small_hunyuan.directory,
    "HunyuanVideo-1.5 image-to-video": small_hunyuan_image.directory,
    "Qwen-Image": lambda: small_qwen_image.directory("image"),
    "Z-Image": lambda: small_z_image.directory("turbo"),
}


def _given(name: str) -> GivenMedia:
    if "image-to-video" in name:
        return GivenMedia((picture(0),))
    return small_vace.given("video and mask") if name == "VACE" else GivenMedia()


@pytest.mark.default_cases("Wan 2.2 image-to-video", "Flux.1")
@pytest.mark.parametrize("name", _FAMILIES)
def test_the_velocity_is_that_of_each_tile_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and videos that come with the latents are cut like them."""
    pipeline = VideoPipeline.open(_FAMILIES[name](), RuntimeConfig(mesh="single", dtype="float32"))
    card = pipeline.family.card
    chosen: dict[str, Any] = {"height": 96, "width": 160, "num_inference_steps": 2, "seed": 7}
    made = pipeline.settings(**chosen, **({} if card.makes_images else {"num_frames": 9}), tile="64x64")
    embeddings = pipeline.encode(PROMPT, made, _given(name))
    tiles = find_tiles(card, made)
    assert tiles is not None
    assert len(tiles) >= 4
    noise = initial_noise(pipeline.latent_shape(made), 7)
    monkeypatch.setattr(denoising, "_draw_noise", lambda running, own, shape, seed: noise)
    velocity = next(pipeline.velocities(embeddings, made))

    def alone(row: slice, column: slice) -> torch.Tensor:
        own = tile_settings(made)
        monkeypatch.setattr(denoising, "_draw_noise", lambda running, own, shape, seed: noise[..., row, column])
        cut = {
            name: rows[..., row, column] if name in pipeline.family.denoiser.frame_inputs else rows
            for name, rows in embeddings.shared.items()
        }
        return next(pipeline.velocities(dataclasses.replace(embeddings, shared=cut), own))

    size = tiles.rows.length, tiles.columns.length
    expected = blend_tiles(noise, alone, tiles.rows.starts, tiles.columns.starts, size)
    assert psnr(velocity, expected) >= SAME
    if cut := set(embeddings.shared) & set(pipeline.family.denoiser.frame_inputs):
        rolled = {name: rows.roll(3, dims=4) if name in cut else rows for name, rows in embeddings.shared.items()}
        monkeypatch.setattr(denoising, "_draw_noise", lambda running, own, shape, seed: noise)
        other = next(pipeline.velocities(dataclasses.replace(embeddings, shared=rolled), made))
        assert psnr(other, expected) < SAME - 20


@pytest.mark.parametrize(
    ("directory", "chosen", "text"),
    [
        (small_ltx2.directory, {}, "is for videos that are made at once, and .* makes sound with them"),
        (small_animate.directory, {}, "continues them from their own last frames"),
        (
            lambda: wan_pipelines.directory("2.2 image"),
            {"num_frames": 21, "context": "continue", "context_frames": 9},
            "continues them from their own last frames",
        ),
    ],
    ids=["sound", "segments", "continued"],
)
def test_videos_that_are_not_made_at_once_are_refused(directory: Any, chosen: dict[str, Any], text: str) -> None:
    pipeline = VideoPipeline.open(directory(), RuntimeConfig(mesh="single"))
    made = pipeline.settings(**{"height": 128, "width": 128, "tile": "64x64", **chosen})
    with pytest.raises(InvalidValueError, match=f"tile=64x64 .*{text}") as caught:
        pipeline.plan(made)
    assert caught.value.field == "tile"


@pytest.mark.parametrize(
    ("directory", "given", "name"),
    [
        (small_vace.directory, GivenMedia(references=(picture(0),)), "reference"),
        (lambda: small_flux2.directory("klein"), GivenMedia((picture(0),)), "image"),
        (lambda: wan_pipelines.directory("5B"), GivenMedia((picture(0),)), "image"),
        (lambda: small_ltx.directory(conditioned=True), GivenMedia((picture(0),)), "image"),
    ],
    ids=["VACE", "Flux.2", "Wan 2.2 5B", "LTX-Video"],
)
def test_pictures_that_are_not_cut_with_the_latents_are_refused_before_anything_is_loaded(
    directory: Any, given: GivenMedia, name: str
) -> None:
    pipeline = VideoPipeline.open(directory(), RuntimeConfig(mesh="single"))
    pipeline.on_progress = lambda progress: pytest.fail(f"it has begun: {progress}")
    made = pipeline.settings(height=128, width=128, tile="64x64", num_inference_steps=1)
    with pytest.raises(InvalidValueError, match=f"looks at all of {name} with it; leave one of them out") as caught:
        pipeline.encode(PROMPT, made, given)
    assert caught.value.field == "tile"


@pytest.mark.parametrize(
    ("directory", "given"),
    [(small_ltx2.directory, {}), (small_vace.directory, {"references": picture(0)})],
    ids=["sound", "references"],
)
def test_a_second_pass_by_tiles_is_refused_before_the_first(directory: Any, given: dict[str, Any]) -> None:
    with comfy_tpu.open(directory(), RuntimeConfig(mesh="single")) as pipe:
        chosen: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 9, "tile": "64x64", "upscale": 2, **given}
        with pytest.raises(InvalidValueError, match="tile=64x64 ") as caught:
            pipe(PROMPT, on_progress=lambda progress: pytest.fail(f"it has begun: {progress}"), **chosen)
        assert caught.value.field == "tile"


def test_embeddings_that_cannot_be_cut_are_refused_by_a_later_stage() -> None:
    pipeline = VideoPipeline.open(small_flux2.directory("klein"), RuntimeConfig(mesh="single"))
    made = pipeline.settings(height=128, width=128, num_inference_steps=1)
    embeddings = pipeline.encode(PROMPT, made, GivenMedia((picture(0, 100, 80),)))
    with pytest.raises(InvalidValueError, match="looks at all of image with it"):
        pipeline.denoise(embeddings, dataclasses.replace(made, tile="64x64"))
    pipeline = VideoPipeline.open(small_vace.directory(), RuntimeConfig(mesh="single"))
    made = pipeline.settings(height=128, width=128, num_frames=9, num_inference_steps=1)
    embeddings = pipeline.encode(PROMPT, made, GivenMedia(references=(picture(0),)))
    with pytest.raises(InvalidValueError, match="looks at all of reference with it"):
        pipeline.denoise(embeddings, dataclasses.replace(made, tile="64x64"))
