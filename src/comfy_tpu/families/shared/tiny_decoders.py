"""Tiny decoders in place of a VAE's: TAESD for images, TAEHV for videos, the latter one latent frame at a time.

Their modules have the names of the published files, whose layers are numbered. What the shapes of a file say about one
is read by `tiny_files.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.model_family import Cache
from comfy_tpu.parallel.rules import replicate

_PREVIEW_SIDE = 512
"""The most pixels of the longer side of a preview, as in ComfyUI."""
_LEVELS = 3
"""Times that a decoder doubles its sides."""
SPATIAL_SCALE = 2**_LEVELS
"""Pixels per latent on a side, before those of the patches."""


class _Clamp(nn.Module):
    """Bounds latents softly to -3..3."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


def _convolution(inputs: int, outputs: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def _three_convolutions(inputs: int, width: int, slope: float) -> nn.Sequential:
    return nn.Sequential(
        _convolution(inputs, width),
        nn.LeakyReLU(slope),
        _convolution(width, width),
        nn.LeakyReLU(slope),
        _convolution(width, width),
    )


class _ImageBlock(nn.Module):
    """A residual block of TAESD; `pools`: it normalizes over the whole image first, as Flux.2's does."""

    def __init__(self, width: int, pools: bool) -> None:
        super().__init__()
        self.conv = _three_convolutions(width, width, 0.0)
        self.pool = (
            nn.Sequential(
                nn.Conv2d(width, 4 * width, 1, bias=False),
                nn.GroupNorm(4, 4 * width),
                nn.ReLU(),
                nn.Conv2d(4 * width, width, 1, bias=False),
            )
            if pools
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return F.relu(self.conv(x) + x)


class _MemoryBlock(nn.Module):
    """A block of TAEHV: reads a frame and the one before it."""

    def __init__(self, width: int, slope: float) -> None:
        super().__init__()
        self.conv = _three_convolutions(2 * width, width, slope)
        self.slope = slope

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(self.conv(torch.cat((x, before), dim=1)) + x, self.slope)


class _WideMemoryBlock(nn.Module):
    """The same of the files named "super": a depthwise convolution of 7 × 7, and a wider middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 7, padding=3, groups=2 * width, bias=False),
            nn.Conv2d(2 * width, 4 * width, 1),
            nn.ReLU(),
            nn.Conv2d(4 * width, width, 1, bias=False),
        )

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat((x, before), dim=1)) + x


class _Grow(nn.Module):
    """Makes `stride` frames of each."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * stride, 1, bias=False)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).reshape(-1, self.width, *x.shape[2:])


def _image_layers(channels: int, widths: Sequence[int], pools: bool) -> Iterator[nn.Module]:
    yield from (_Clamp(), _convolution(channels, widths[0]), nn.ReLU())
    for level, (width, following) in enumerate(itertools.pairwise(widths)):
        yield from (_ImageBlock(width, pools and level == 0) for _ in range(3))
        yield from (nn.Upsample(scale_factor=2), _convolution(width, following, bias=False))
    yield from (_ImageBlock(widths[-1], False), _convolution(widths[-1], 3))


def _video_layers(
    channels: int, widths: Sequence[int], strides: Sequence[int], outputs: int, slope: float
) -> Iterator[nn.Module]:
    yield from (_Clamp(), _convolution(channels, widths[0]), nn.LeakyReLU(slope))
    for width, following, stride in zip(widths, widths[1:], strides, strict=False):
        yield from (_MemoryBlock(width, slope) for _ in range(3))
        yield from (nn.Upsample(scale_factor=2), _Grow(width, stride), _convolution(width, following, bias=False))
    yield from (nn.LeakyReLU(slope), _convolution(widths[-1], outputs))


def _wide_video_layers(
    channels: int, widths: Sequence[int], strides: Sequence[int], outputs: int
) -> Iterator[nn.Module]:
    yield nn.Conv2d(channels, widths[0], 1, bias=False)
    for width, following, stride in zip(widths, widths[1:], strides, strict=False):
        yield from (_WideMemoryBlock(width) for _ in range(3))
        yield from (_convolution(width, 4 * following), nn.ReLU(), nn.PixelShuffle(2), _Grow(following, stride))
    yield _convolution(widths[-1], outputs)


class TinyDecoder(nn.Module):
    """A tiny decoder, from the configuration that `tiny_files.py` makes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        channels, widths, strides = config["channels"], config["widths"], config["strides"]
        outputs = 3 * config["output_patch"] ** 2
        layers = {
            "image": lambda: _image_layers(channels, widths, config["pools"]),
            "video": lambda: _video_layers(channels, widths, strides, outputs, config["slope"]),
            "wide_video": lambda: _wide_video_layers(channels, widths, strides, outputs),
        }[config["kind"]]()
        self.decoder = nn.Sequential(*layers)


TINY_VAE = ComponentSpec(
    name="tiny_vae",
    classes=(),
    build=TinyDecoder,
    rules=(replicate("*"),),  # 5 to 45 MB; the image is split over the mesh, not the weights
)


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> one frame if it is the first, else as many as
    a latent stands for: [batch, t, height, width, 3] in 0..1. The cache is the frame before of each memory block."""
    config = module.config
    x = _spread_patches(latent.squeeze(2), config["input_patch"])
    if config["reads_vae_scale"]:
        mean, deviation = (torch.tensor(config[name], device=x.device).view(1, -1, 1, 1) for name in ("mean", "std"))
        x = x * deviation + mean
    x = x.to(next(module.parameters()).dtype)
    batch, earlier, later = len(x), iter(cache or ()), Cache()
    for layer in module.decoder:
        if not isinstance(layer, (_MemoryBlock, _WideMemoryBlock)):
            x = layer(x)
            continue
        frames = x.unflatten(0, (batch, -1))
        first: Any = torch.zeros_like(frames[:, :1]) if cache is None else next(earlier)
        later.append(frames[:, -1:])
        x = layer(x, torch.cat((first, frames[:, :-1]), dim=1).flatten(0, 1))
    # All frames of the first latent but the last one stand for times before the video.
    frames = x.float().unflatten(0, (batch, -1))[:, -1 if cache is None else 0 :]
    if config["is_signed"]:
        frames = frames.add(1).div(2)
    pixels = F.pixel_shuffle(frames.clamp(0, 1), config["output_patch"])
    return pixels.permute(0, 1, 3, 4, 2), later


def decode_preview(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """The last frame of `decode_frame`, averaged to a small image: frames of 1280×720×81 are 0.9 GB on the host."""
    frames, cache = decode_frame(module, latent, cache)
    height, width = frames.shape[2:4]
    factor = math.ceil(max(height, width) / _PREVIEW_SIDE)
    rows, columns = height // factor, width // factor
    cut = frames[:, -1:, : rows * factor, : columns * factor]
    return cut.unflatten(3, (columns, factor)).unflatten(2, (rows, factor)).mean(dim=(3, 5)), cache


def _spread_patches(latent: torch.Tensor, side: int) -> torch.Tensor:
    """[batch, channels × side², height, width] -> [batch, channels, height × side, width × side]."""
    return latent if side == 1 else F.pixel_shuffle(latent, side)
