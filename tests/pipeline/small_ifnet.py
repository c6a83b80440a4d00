"""Files of RIFE 4.25 and 4.26 with random weights, and what they make, in plain PyTorch from the published
description."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def make_tensors(widths: Sequence[int] = (16, 12, 8, 8, 4), *, features: int = 4, seed: int = 0) -> Tensors:
    random, tensors = torch.Generator().manual_seed(seed), Tensors()

    def add(
        name: str, outputs: int, inputs: int, side: int = 3, *, transposed: bool = False, gain: float = 1.4
    ) -> None:
        shape = (inputs, outputs, side, side) if transposed else (outputs, inputs, side, side)
        fan = inputs * side**2 / (4 if transposed else 1)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=random) / math.sqrt(fan) * gain
        tensors[f"{name}.bias"] = torch.randn(outputs, generator=random) * 0.1

    add("encode.cnn0", 16, 3)
    add("encode.cnn1", 16, 16)
    add("encode.cnn2", 16, 16)
    add("encode.cnn3", features, 16, 4, transposed=True)
    for number, width in enumerate(widths):
        add(f"block{number}.conv0.0.0", width // 2, 7 + 2 * features + (13 if number else 0))
        add(f"block{number}.conv0.1.0", width, width // 2)
        for place in range(8):
            add(f"block{number}.convblock.{place}.conv", width, width, gain=0.5)
            tensors[f"block{number}.convblock.{place}.beta"] = torch.rand(1, width, 1, 1, generator=random)
        add(f"block{number}.lastconv.0", 52, width, 4, transposed=True, gain=0.3)
    return tensors


def _convolve(tensors: Tensors, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    return F.conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], stride=stride, padding=1)


def _expand(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], stride=2, padding=1)


def _leak(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def _encode(tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        x = _leak(_convolve(tensors, f"encode.cnn{number}", x, 2 if number == 0 else 1))
    return _expand(tensors, "encode.cnn3", x)


def _block(
    tensors: Tensors, name: str, x: torch.Tensor, flow: torch.Tensor | None, scale: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    small = F.interpolate(x, size=[side // scale for side in x.shape[2:]], mode="bilinear")
    if flow is not None:
        reduced = F.interpolate(flow, size=[side // scale for side in flow.shape[2:]], mode="bilinear")
        small = torch.cat([small, reduced / scale], dim=1)
    hidden = _leak(_convolve(tensors, f"{name}.conv0.1.0", _leak(_convolve(tensors, f"{name}.conv0.0.0", small, 2)), 2))
    for place in range(8):
        beta = tensors[f"{name}.convblock.{place}.beta"]
        hidden = _leak(_convolve(tensors, f"{name}.convblock.{place}.conv", hidden) * beta + hidden)
    out = F.pixel_shuffle(_expand(tensors, f"{name}.lastconv.0", hidden), 2)
    out = F.interpolate(out, size=x.shape[2:], mode="bilinear")
    return out[:, :4] * scale, out[:, 4:5], out[:, 5:]


def warp(x: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """By hand, without grid_sample: bilinear between four pixels, the border repeated."""
    height, width = x.shape[2:]
    down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    column = (across + flow[0, 0].double()).clamp(0, width - 1)
    row = (down + flow[0, 1].double()).clamp(0, height - 1)
    left, top = column.floor().long(), row.floor().long()
    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    part, share = (column - left), (row - top)
    upper = x[0, :, top, left] * (1 - part) + x[0, :, top, right] * part
    lower = x[0, :, bottom, left] * (1 - part) + x[0, :, bottom, right] * part
    return (upper * (1 - share) + lower * share).float()[None]


def interpolate(
    tensors: Tensors, first: torch.Tensor, second: torch.Tensor, time: float, scales: Sequence[int] = (16, 8, 4, 2, 1)
) -> torch.Tensor:
    """Two frames [height, width, 3] in 0..1 -> the one between them."""
    multiple, (height, width) = 4 * scales[0], first.shape[:2]
    padded = (math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple)
    images = []
    for frame in (first, second):
        image = torch.zeros(1, 3, *padded)
        image[0, :, :height, :width] = frame.movedim(-1, 0)
        images.append(image)
    features = [_encode(tensors, image) for image in images]
    at = torch.full((1, 1, *padded), time)
    flow = mask = kept = None
    for number, scale in enumerate(scales):
        if flow is None:
            flow, mask, kept = _block(tensors, "block0", torch.cat([*images, *features, at], dim=1), None, scale)
            continue
        moved = [warp(images[0], flow[:, :2]), warp(images[1], flow[:, 2:])]
        moved += [warp(features[0], flow[:, :2]), warp(features[1], flow[:, 2:])]
        inputs = torch.cat([*moved, at, mask, kept], dim=1)
        change, mask, kept = _block(tensors, f"block{number}", inputs, flow, scale)
        flow = flow + change
    share = torch.sigmoid(mask)
    made = warp(images[0], flow[:, :2]) * share + warp(images[1], flow[:, 2:]) * (1 - share)
    return made[0, :, :height, :width].clamp(0, 1).movedim(0, -1)
