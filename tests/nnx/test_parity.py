"""The Wan VAE by Flax and by torchax against diffusers': scanned and unrolled, on one device and over eight."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock

from benchmarks.vae import whole_videos
from comfy_tpu.families.wan.nnx_vae import decoding
from tests.covering import covering
from tests.nnx.small_vaes import four_levels, irregular, random, run, tiny
from tests.tracing import relative_error

MESHES = ["single", "dp=2,sp=4"]
DECODE = (decoding.decode, decoding.decode_unrolled)
ENCODE = (decoding.encode, decoding.encode_unrolled)
TORCH_DECODE = (whole_videos.decode_scanned, whole_videos.decode_unrolled)
TORCH_ENCODE = (whole_videos.encode_scanned, whole_videos.encode_unrolled)


def every_length(
    backend: tuple[Callable[..., Any], Callable[..., Any]], study: tuple[Callable[..., Any], Callable[..., Any]]
) -> pytest.MarkDecorator:
    """By default what a user can run, scanned over one frame and several, on one device and on a mesh. Scans of 17 and
    81 frames are one program but for a number; unrolled, they take minutes to compile."""
    default = [(backend[0], 1, "single"), (backend[0], 5, "dp=2,sp=4")]
    cases = []
    for function, frames, mesh in itertools.product((*backend, *study), (1, 5, 17, 81), MESHES):
        name = f"{'torchax' if function in study else 'flax'}-{function.__name__}-{frames}-{mesh}"
        marks = [] if (function, frames, mesh) in default else [pytest.mark.slow]
        cases.append(pytest.param(frames, function, mesh, marks=marks, id=name))
    return pytest.mark.parametrize(("frames", "function", "mesh"), cases)


@functools.cache
def decoded(model: Callable[[], Any], latents: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    given = random(1, 4, latents, rows, columns)
    return given, model().reference.decode(given, return_dict=False)[0]


@functools.cache
def encoded(model: Callable[[], Any], frames: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    given = random(1, 3, frames, rows, columns).clamp(-1, 1)
    return given, model().reference.encode(given).latent_dist.parameters


@pytest.mark.default_cases("flax-decode-5-dp=2,sp=4")
@every_length(DECODE, TORCH_DECODE)
def test_decode(frames: int, function: Callable[..., Any], mesh: str) -> None:
    latents, expected = decoded(tiny, (frames + 3) // 4, 3, 5)
    actual = run(tiny(), function, mesh, latents)
    assert actual.shape == (1, 3, frames, 12, 20)
    assert relative_error(actual, expected) <= 1e-4


@pytest.mark.default_cases("flax-encode-5-dp=2,sp=4")
@every_length(ENCODE, TORCH_ENCODE)
def test_encode(frames: int, function: Callable[..., Any], mesh: str) -> None:
    video, expected = encoded(tiny, frames, 12, 20)
    actual = run(tiny(), function, mesh, video)
    assert actual.shape == (1, 8, (frames + 3) // 4, 3, 5)
    assert relative_error(actual, expected) <= 1e-4


@pytest.mark.slow
@covering(
    "columns, mesh, functions",
    [7, 16],
    ["single", "dp=2,sp=2,tp=2"],
    [(decoding.decode, decoding.encode), (whole_videos.decode_scanned, whole_videos.encode_scanned)],
    strength=0,
    always=[(7, "single", (decoding.decode, decoding.encode))],
)
def test_published_depth(columns: int, mesh: str, functions: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """Four levels, as the published models have, with 8 × 8 pixels for a latent."""
    decode, encode = functions
    latents, pixels = decoded(four_levels, 3, 5, columns)
    assert relative_error(run(four_levels(), decode, mesh, latents), pixels) <= 1e-4
    video, moments = encoded(four_levels, 9, 40, 8 * columns)
    assert relative_error(run(four_levels(), encode, mesh, video), moments) <= 1e-4


@pytest.mark.slow
def test_irregular_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    # diffusers hands its cache to the attention between the encoder's blocks, which does not take one.
    attend = WanAttentionBlock.forward
    monkeypatch.setattr(WanAttentionBlock, "forward", lambda self, x, feat_cache=None, feat_idx=None: attend(self, x))
    latents, pixels = decoded(irregular, 3, 5, 3)
    assert relative_error(run(irregular(), decoding.decode, "single", latents), pixels) <= 1e-4
    video, moments = encoded(irregular, 9, 40, 24)
    assert relative_error(run(irregular(), decoding.encode, "single", video), moments) <= 1e-4


@pytest.mark.slow
def test_several_videos_at_once() -> None:
    latents = random(2, 4, 3, 3, 5)
    expected = tiny().reference.decode(latents, return_dict=False)[0]
    assert relative_error(run(tiny(), decoding.decode, "dp=2,sp=4", latents), expected) <= 1e-4


@pytest.mark.thorough  # by default: whole ones
@covering(
    "pixels, mesh, encode",
    [39, 41],
    MESHES,
    [decoding.encode, whole_videos.encode_scanned],
    strength=0,
    always=[(41, "single", decoding.encode)],
)
def test_encode_pixels_that_make_no_whole_latents(pixels: int, mesh: str, encode: Callable[..., Any]) -> None:
    video, expected = encoded(four_levels, 5, pixels, pixels + 2)
    actual = run(four_levels(), encode, mesh, video)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= 1e-4


@pytest.mark.thorough  # by default: whole parts
@covering("frames, encode", [4, 7], [*ENCODE, *TORCH_ENCODE], strength=0, always=[(7, decoding.encode)])
def test_frames_behind_the_last_whole_part_are_left_out(frames: int, encode: Callable[..., Any]) -> None:
    video, expected = encoded(tiny, frames, 12, 20)
    actual = run(tiny(), encode, "single", video)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["single", pytest.param("dp=2,sp=4", marks=pytest.mark.slow)])
def test_bfloat16(mesh: str) -> None:
    latents, pixels = decoded(tiny, 3, 3, 5)
    assert relative_error(run(tiny(), decoding.decode, mesh, latents, torch.bfloat16), pixels) <= 2e-2
    video, moments = encoded(tiny, 9, 12, 20)
    assert relative_error(run(tiny(), decoding.encode, mesh, video, torch.bfloat16), moments) <= 2e-2
