"""Tiny decoders, frame by frame, against whole videos in plain PyTorch; and what a file is recognised as."""

from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.shared.tiny_decoders import TINY_VAE, decode_frame, decode_preview
from comfy_tpu.families.shared.tiny_files import TinyFile, limit_frames, read_tiny_file
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.vae_backend import COLUMN_AXES
from tests.closeness import SAME, psnr
from tests.families import small_tiny_decoders as small

LATENTS = torch.randn(1, 16, 3, 5, 9, generator=torch.Generator().manual_seed(0)) * 1.5
"""Sides that nothing divides, on eight devices."""


def decode(
    file: TinyFile, latents: torch.Tensor, mesh: str = "single", function: Any = decode_frame, **more: Any
) -> Any:
    config = {**file.config, **more}
    component = Component(TINY_VAE, config, make_placement(mesh), dtype=torch.float32)
    weights = component.load(file.source)
    axes = {"latent": COLUMN_AXES, "cache": COLUMN_AXES}
    program, cache, parts = component.program(function, input_axes=axes, donate=("cache",)), None, []
    for latent in latents.split(1, dim=2):
        frames, cache = program(weights, latent=latent.contiguous(), cache=cache)
        parts.append(to_host(frames))
    return parts


def read(path: Path, tensors: small.Tensors) -> TinyFile:
    return read_tiny_file(Checkpoint.open(small.save(path, tensors)))


@pytest.mark.parametrize("mesh", ["single", pytest.param("dp=8", marks=pytest.mark.slow)])
def test_wan(mesh: str, tmp_path: Path) -> None:
    tensors = small.video_tensors(16)
    file = read(tmp_path / "taew2_1.safetensors", tensors)
    assert (file.channels, file.spatial_scale, file.temporal_scale) == (16, 8, 4)
    parts = decode(file, LATENTS, mesh)
    assert [part.shape for part in parts] == [(1, 1, 40, 72, 3), (1, 4, 40, 72, 3), (1, 4, 40, 72, 3)]
    expected = small.decode_video(tensors, LATENTS)
    assert 0.1 < expected.mean() < 0.9
    assert expected.std() > 0.1
    assert psnr(torch.cat(parts, dim=1), expected) >= SAME
    alone = small.decode_video(tensors, LATENTS[:, :, 1:])
    assert psnr(alone[:, -4:], expected[:, -4:]) < 60, "a decoder without its memory would be seen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "channels", "strides", "patch"),
    [("taew2_2", 48, (1, 2, 2), 2), ("taehv1_5", 32, (1, 2, 2), 2), ("taeltx2_3", 128, (2, 2, 2), 4)],
)
def test_other_videos(name: str, channels: int, strides: tuple[int, ...], patch: int, tmp_path: Path) -> None:
    tensors = small.video_tensors(channels, strides=strides, patch=patch)
    file = read(tmp_path / f"{name}.safetensors", tensors)
    assert (file.channels, file.spatial_scale) == (channels, 8 * patch)
    latents = torch.randn(1, channels, 3, 3, 2)
    expected = small.decode_video(tensors, latents, patch=patch)
    assert expected.shape[1] == 1 + 2 * file.temporal_scale
    assert psnr(torch.cat(decode(file, latents), dim=1), expected) >= SAME


@pytest.mark.slow
def test_super(tmp_path: Path) -> None:
    tensors = small.wide_video_tensors(48, patch=2)
    file = read(tmp_path / "taew2_2_super.safetensors", tensors)
    latents = torch.randn(1, 48, 3, 3, 2)
    expected = small.decode_wide_video(tensors, latents, patch=2)
    assert psnr(torch.cat(decode(file, latents), dim=1), expected) >= SAME


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "signed"), [(16, False), (32, True)])
def test_light(channels: int, signed: bool, tmp_path: Path) -> None:
    """LightX2V's files have TAEHV's shapes, and read latents of the VAE's scale; that of HunyuanVideo-1.5 differs
    more."""
    tensors = small.video_tensors(channels, patch=2 if signed else 1)
    file = read(tmp_path / "lighttae_x.safetensors", tensors)
    mean, std = torch.linspace(-1, 1, channels), torch.linspace(0.5, 2, channels)
    latents = torch.randn(1, channels, 2, 3, 2)
    scaled = latents * std.view(1, -1, 1, 1, 1) + mean.view(1, -1, 1, 1, 1)
    options = {"patch": 2, "slope": 0.2, "signed": True} if signed else {}
    expected = small.decode_video(tensors, scaled, **options)
    made = decode(file, latents, mean=mean.tolist(), std=std.tolist())
    assert psnr(torch.cat(made, dim=1), expected) >= SAME


@pytest.mark.parametrize("pools", [pytest.param(False, marks=pytest.mark.slow), True], ids=["flux1", "flux2"])
def test_images(pools: bool, tmp_path: Path) -> None:
    """Flux.2's latents are patches of what its decoder reads."""
    channels, patch = (32, 2) if pools else (16, 1)
    tensors = small.image_tensors(channels, pools=pools)
    own = read(tmp_path / "own.safetensors", tensors)
    diffusers = read(tmp_path / "diffusers.safetensors", small.as_diffusers(tensors))
    assert own.config == diffusers.config
    assert set(own.source.tensors) == set(diffusers.source.tensors)
    assert not own.makes_videos
    latents = torch.randn(1, channels * patch**2, 1, 3, 4)
    expected = small.decode_image(tensors, latents, patch=patch)
    assert expected.shape == (1, 1, 24 * patch, 32 * patch, 3)
    assert psnr(decode(diffusers, latents, input_patch=patch)[0], expected) >= SAME


def test_more_frames_than_the_model_has(tmp_path: Path) -> None:
    """A file whose first level doubles the frames, for a model with four per latent: the last frame of each two."""
    tensors = small.video_tensors(16, strides=(2, 2, 2))
    file = limit_frames(read(tmp_path / "x.safetensors", tensors), 4)
    assert file.temporal_scale == 4
    shape = file.source.tensors["decoder.7.conv.weight"].shape
    assert shape == (12, 12, 1, 1)
    assert torch.equal(file.source.read("decoder.7.conv.weight"), tensors["decoder.7.conv.weight"][12:])
    assert limit_frames(file, 4) is file


@pytest.mark.slow
def test_previews_are_small(tmp_path: Path) -> None:
    tensors = small.video_tensors(16)
    file = read(tmp_path / "x.safetensors", tensors)
    latents = torch.randn(1, 16, 2, 5, 130)
    whole, made = small.decode_video(tensors, latents), decode(file, latents, function=decode_preview)
    assert [part.shape for part in made] == [(1, 1, 13, 346, 3)] * 2
    cut = whole[:, [0, 4], :39, :1038].unflatten(2, (13, 3)).unflatten(4, (346, 3)).mean(dim=(3, 5))
    assert psnr(torch.cat(made, dim=1), cut) >= SAME


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {"a.weight": torch.zeros(2)},
            "holds no tiny decoder: it has a.weight; use a safetensors file",
        ),
        (
            lambda tensors: {"decoder.22.weight": tensors["decoder.22.weight"]},
            r"is not a whole tiny decoder \(KeyError",
        ),
    ],
)
def test_other_files(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "x.safetensors", change(small.video_tensors(16)))


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    tensors = small.video_tensors(16)
    del tensors["decoder.10.conv.2.bias"]
    file = read(tmp_path / "x.safetensors", tensors)
    component = Component(TINY_VAE, file.config, make_placement("single"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"decoder\.10\.conv\.2\.bias"):
        component.check(file.source)
