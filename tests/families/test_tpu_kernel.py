"""Whole models with the TPU's attention kernel, interpreted on the CPU, on the layouts that `auto` takes for them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.config import AttentionConfig, BlockSizes, RuntimeConfig
from comfy_tpu.kernels import dispatch, rotary_attention
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import small_flux, small_flux2, small_hunyuan, small_ltx, wan_pipelines
from tests.families.meshes import AUTO
from tests.pipeline import small_pipeline

SETTINGS: dict[str, Any] = {"width": 48, "height": 32, "num_inference_steps": 2, "seed": 7, "max_sequence_length": 32}
VIDEO: dict[str, Any] = {"num_frames": 5}
# 544 tokens: a share of four is more than a tile of 128, and no whole registers of rows.
LARGE: dict[str, Any] = VIDEO | {"width": 272, "height": 256}
KERNEL = AttentionConfig(
    implementation="splash", dense_max_tokens=1, block_sizes=BlockSizes(query=128, key=128, key_compute=128)
)
MODELS: dict[str, tuple[Callable[[], Path], dict[str, Any], tuple[str, ...]]] = {
    "Wan 2.1": (small_pipeline.directory, VIDEO, ("dp=2,sp=4", "sp=8")),
    "Wan with heads of whole lanes": (
        functools.partial(wan_pipelines.directory, wan_pipelines.WHOLE_LANES),
        LARGE,
        ("dp=2,sp=4",),
    ),
    "Wan 2.2": (functools.partial(wan_pipelines.directory, "2.2"), VIDEO, AUTO["Wan 2.2"]),
    "HunyuanVideo-1.5": (small_hunyuan.directory, VIDEO | {"max_sequence_length": None}, ("dp=2,sp=4", "sp=8")),
    "Flux.1": (functools.partial(small_flux.directory, "dev"), {}, AUTO["Flux.1"]),
    "Flux.2": (functools.partial(small_flux2.directory, "dev"), {}, AUTO["Flux.2"]),
    "LTX-Video": (small_ltx.directory, {"num_frames": 9, "width": 64}, AUTO["LTX-Video"]),
}


def generate(
    name: str, mesh: str, attention: AttentionConfig, prompt: str = "a red circle moving left"
) -> torch.Tensor:
    directory, own, _ = MODELS[name]
    pipeline = VideoPipeline.open(directory(), RuntimeConfig(mesh=mesh, attention=attention))
    settings = pipeline.settings(**(SETTINGS | own))
    return torch.cat(list(pipeline.generate(prompt, settings)), dim=1)


@functools.cache
def without_the_kernel(name: str) -> torch.Tensor:
    return generate(name, "single", AttentionConfig())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for name, (_, _, meshes) in MODELS.items() for mesh in meshes])
def test_the_kernel_makes_the_video_that_is_made_without_it(
    name: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    kernel = dispatch.splash_attention
    monkeypatch.setattr(dispatch, "splash_attention", lambda *a, **k: calls.append(a[0].shape) or kernel(*a, **k))
    rotated = []
    rotate = rotary_attention.rotate_heads
    monkeypatch.setattr(rotary_attention, "rotate_heads", lambda *a, **k: rotated.append(a) or rotate(*a, **k))
    expected = without_the_kernel(name)
    assert psnr(generate(name, mesh, KERNEL), expected) >= SAME
    assert calls, "the kernel was traced"
    assert bool(rotated) == ("whole lanes" in name)
    other = generate(name, "single", AttentionConfig(), "a blue square")
    assert psnr(other, expected) < SAME - 10, "the comparison would see another prompt"
