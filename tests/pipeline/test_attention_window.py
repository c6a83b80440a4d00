"""Attention windows in a whole step: they reach self-attention only, and are refused where they cannot work."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from comfy_tpu.bridge import rotary
from comfy_tpu.config import ATTENTION_WINDOWS, AttentionConfig, RuntimeConfig, TileWindow, TokenWindow
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import load_families
from comfy_tpu.kernels.windows import make_schedule, parse_blocks, parse_window
from comfy_tpu.pipeline.checks import check_window
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_hunyuan, small_ltx
from tests.kernels.test_tiles import dense_mask
from tests.tracing import relative_error

GRID = (2, 4, 4)
"""Tokens of the demo model's shortest video."""


@functools.cache
def latents(window: str, mesh: str = "single", model: str | Path = "demo") -> torch.Tensor:
    runtime = RuntimeConfig(mesh=mesh, attention=AttentionConfig(window=parse_window(window)))
    pipeline = VideoPipeline.open(model, runtime)
    settings = pipeline.settings(num_inference_steps=1, guidance_scale=1.0, num_frames=5, seed=3)
    shapes = pipeline.embedding_shapes(settings)
    made = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(1, *shape, generator=made) for name, shape in shapes.items()}
    return pipeline.denoise(PromptEmbeddings("", rows, None), settings)


@pytest.mark.thorough  # by default: the dense mask of the pattern, and tests/kernels/test_tiles.py
def test_a_window_over_the_whole_video_changes_nothing_and_a_smaller_one_does() -> None:
    full, covering, sparse = (latents(window) for window in ("full", "1x2x4:2x2x1", "1x2x4:1x2x1"))
    assert relative_error(covering, full) <= 1e-5
    assert relative_error(sparse, full) > 1e-3


def test_a_window_is_a_dense_mask_of_the_same_pattern(monkeypatch) -> None:
    """In the order of the model's own tokens."""
    windowed = latents("1x2x4:1x2x1")
    mask = torch.from_numpy(dense_mask(TileWindow((1, 2, 4), (1, 2, 1)), GRID, 0))
    masked = functools.partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
    monkeypatch.setattr(rotary, "video_attention", masked)
    assert relative_error(windowed, latents.__wrapped__("full")) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,sp=4", "dp=2,tp=4"])
def test_a_window_is_the_same_on_a_mesh(mesh: str) -> None:
    assert relative_error(latents("1x2x4:1x2x1", mesh), latents("1x2x4:1x2x1")) <= 1e-4


@pytest.mark.slow
def test_a_window_of_tokens_that_covers_the_video_changes_nothing_and_a_smaller_one_does() -> None:
    assert relative_error(latents("31,31"), latents("full")) <= 1e-5
    assert relative_error(latents("4,4"), latents("full")) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("small", [small_ltx, small_hunyuan], ids=["LTX-Video", "HunyuanVideo"])
def test_other_families_have_windows(small) -> None:
    full, covering, sparse = (
        small_video(small.directory(), window) for window in ("full", "1x1x1:99x99x99", "1x1x1:1x1x1")
    )
    assert relative_error(covering, full) <= 1e-4
    assert relative_error(sparse, full) > 1e-3


def small_video(directory: Path, window: str) -> torch.Tensor:
    runtime = RuntimeConfig(mesh="single", attention=AttentionConfig(window=parse_window(window)))
    pipeline = VideoPipeline.open(directory, runtime)
    settings = pipeline.settings(num_inference_steps=1, height=64, width=64, num_frames=9, guidance_scale=1.0)
    return pipeline.denoise(pipeline.encode("a red circle", settings), settings)


def test_families_of_videos_have_a_grid_and_those_of_images_refuse_windows() -> None:
    for family in load_families():
        files = SimpleNamespace(family=family, name="some model")
        config = AttentionConfig(window=ATTENTION_WINDOWS["video"])
        if family.card.limits.frames_max > 1 and family.sound is None:  # tokens of a sound have no place in a grid
            check_window(config, files)
            assert family.denoiser.token_grid is not None
            continue
        with pytest.raises(InvalidValueError, match="is for transformers of video tokens, and some model has none; "):
            check_window(config, files)


def test_a_tile_that_is_too_large_is_refused_before_anything_is_loaded() -> None:
    pipeline = VideoPipeline.open(
        "demo", RuntimeConfig(attention=AttentionConfig(window=TileWindow((3, 1, 1), (1, 1, 1))))
    )
    with pytest.raises(InvalidValueError, match="a tile of 3 frames does not fit into the video's 2") as caught:
        pipeline.encode("a red circle", pipeline.settings(num_frames=5))
    assert caught.value.field == "attention_window"
    assert make_schedule(ATTENTION_WINDOWS["video"], GRID).attended_share == 1


@pytest.mark.parametrize("window", [TileWindow((0, 1, 1), (1, 1, 1)), TokenWindow(-1, 4)])
def test_windows_made_in_python_are_checked(window) -> None:
    with pytest.raises(InvalidValueError, match="is no window"):
        VideoPipeline.open("demo", RuntimeConfig(attention=AttentionConfig(window=window)))


def test_windows_and_blocks_as_text() -> None:
    assert parse_window(" Full ") is None
    assert parse_window("video") == ATTENTION_WINDOWS["video"]
    assert parse_window("2048, 0") == TokenWindow(2048, 0)
    assert parse_window("4×16x16:3x3x1") == TileWindow((4, 16, 16), (3, 3, 1))
    assert parse_blocks("auto") is None
    for text in ("", "3", "1,2,3", "4x16:3x3", "0x1x1:1x1x1", "-1,2", "4x16x16:3x3x3:1x1x1"):
        with pytest.raises(InvalidValueError, match="is no window"):
            parse_window(text)
