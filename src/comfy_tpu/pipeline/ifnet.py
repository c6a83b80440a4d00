"""IFNet of RIFE 4.25 and 4.26: a frame between two others, by the motion from it to both.

Five blocks estimate the motion from coarse to fine. Each reads both frames as the motion so far moves them, and their
features; the last one's mask says how much of which frame is shown. Modules have the names of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.recorded_tensors import RecordedSource, record_tensors
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.errors import CheckpointError, join_names
from comfy_tpu.parallel.rules import replicate

_BLOCKS = 5
_SLOPE = 0.2
_SCALES, _LITE_SCALES = (16, 8, 4, 2, 1), (32, 16, 8, 4, 1)
"""The factors by which frames are reduced for each block."""
_LITE_WIDTH = 24
"""The width of the last block of the "lite" files."""
_STRIDE = 4
"""By which a block reduces its input further."""
_RESIDUALS = 8
_FLOW, _MASK, _KEPT = 4, 1, 8
"""Outputs of a block: motion to both frames, the mask, and features for the next block."""
_PREFIXES = ("module.", "flownet.", "")
_UNUSED = ("caltime.", "teacher.")
"""Parts of training."""


def _reduce(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.LeakyReLU(_SLOPE))


class _Features(nn.Module):
    """Features of a frame, in its size."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.cnn0 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.cnn1 = nn.Conv2d(width, width, 3, padding=1)
        self.cnn2 = nn.Conv2d(width, width, 3, padding=1)
        self.cnn3 = nn.ConvTranspose2d(width, features, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.cnn0, self.cnn1, self.cnn2):
            x = F.leaky_relu(layer(x), _SLOPE)
        return self.cnn3(x)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.beta = nn.Parameter(torch.ones(1, width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(self.conv(x) * self.beta + x, _SLOPE)


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv0 = nn.Sequential(_reduce(inputs, width // 2), _reduce(width // 2, width))
        self.convblock = nn.Sequential(*(_Residual(width) for _ in range(_RESIDUALS)))
        outputs = 4 * (_FLOW + _MASK + _KEPT)
        self.lastconv = nn.Sequential(nn.ConvTranspose2d(width, outputs, 4, stride=2, padding=1), nn.PixelShuffle(2))

    def forward(self, x: torch.Tensor, flow: torch.Tensor | None, scale: int) -> tuple[torch.Tensor, ...]:
        """A change of the motion in pixels, the mask before its sigmoid, features."""
        x = _shrink(x, scale)
        if flow is not None:
            x = torch.cat((x, _shrink(flow, scale) / scale), dim=1)
        made = _enlarge(self.lastconv(self.convblock(self.conv0(x))), scale)
        change, mask, kept = made.split((_FLOW, _MASK, _KEPT), dim=1)
        return change * scale, mask, kept


# F.interpolate and F.grid_sample are gathers of single values in a trace.


def _shrink(x: torch.Tensor, scale: int) -> torch.Tensor:
    """F.interpolate, bilinear, by 1/scale, an even number: the mean of the two values in the middle of each `scale`."""
    if scale == 1:
        return x
    middle = scale // 2
    x = (x[:, :, middle - 1 :: scale] + x[:, :, middle::scale]) / 2
    return (x[..., middle - 1 :: scale] + x[..., middle::scale]) / 2


def _enlarge(x: torch.Tensor, scale: int) -> torch.Tensor:
    """F.interpolate, bilinear, by an even number."""
    return x if scale == 1 else _enlarge_rows(_enlarge_rows(x, scale).mT, scale).mT


def _enlarge_rows(x: torch.Tensor, scale: int) -> torch.Tensor:
    before = torch.cat((x[:, :, :1], x[:, :, :-1]), dim=2).unsqueeze(3)
    after = torch.cat((x[:, :, 1:], x[:, :, -1:]), dim=2).unsqueeze(3)
    share = ((torch.arange(scale // 2, device=x.device) + 0.5) / scale).view(-1, 1)
    here = x.unsqueeze(3)
    early = before * (0.5 - share) + here * (0.5 + share)
    late = here * (1 - share) + after * share
    return torch.cat((early, late), dim=3).flatten(2, 3)


class IFNet(nn.Module):
    """The network, from the configuration that `read_ifnet` makes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        features = config["features"]
        self.encode = _Features(config["feature_width"], features)
        for number, width in enumerate(config["widths"]):
            # Two frames, their features, the time; then also the mask, the kept features and the motion.
            inputs = 2 * 3 + 2 * features + 1 + (0 if number == 0 else _MASK + _KEPT + _FLOW)
            self.add_module(f"block{number}", _Block(inputs, width))


IFNET = ComponentSpec(name="interpolation", classes=(), build=IFNet, rules=(replicate("*"),))


def interpolate_frames(module: Any, first: torch.Tensor, second: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Frames [batch, height, width, 3] in 0..1 and times in 0..1 -> [batch, times, height, width, 3] between them."""
    count, (height, width) = len(times), first.shape[1:3]
    frames = [_prepare(frame, module.config["multiple"]) for frame in (first, second)]
    features = [module.encode(frame).repeat_interleave(count, dim=0) for frame in frames]
    frames = [frame.repeat_interleave(count, dim=0) for frame in frames]
    time = times.float().repeat(len(first)).view(-1, 1, 1, 1).expand(-1, 1, *frames[0].shape[2:])
    flow: Any = None
    mask: Any = None
    kept: Any = None
    moved, moved_features = frames, features
    for number, scale in enumerate(module.config["scales"]):
        block = getattr(module, f"block{number}")
        if flow is None:
            flow, mask, kept = block(torch.cat((*moved, *moved_features, time), dim=1), None, scale)
        else:
            inputs = torch.cat((*moved, *moved_features, time, mask, kept), dim=1)
            change, mask, kept = block(inputs, flow, scale)
            flow = flow + change
        motions = flow.split(2, dim=1)
        joined = (torch.cat(pair, dim=1) for pair in zip(frames, features, strict=True))
        warped = [_warp(each, motion) for each, motion in zip(joined, motions, strict=True)]
        moved, moved_features = [each[:, :3] for each in warped], [each[:, 3:] for each in warped]
    share = torch.sigmoid(mask)
    made = (moved[0] * share + moved[1] * (1 - share))[:, :, :height, :width].clamp(0, 1)
    return made.unflatten(0, (-1, count)).permute(0, 1, 3, 4, 2)


def _prepare(frame: torch.Tensor, multiple: int) -> torch.Tensor:
    """Channels first, padded with black at the right and at the bottom."""
    height, width = frame.shape[1:3]
    x = frame.float().clamp(0, 1).permute(0, 3, 1, 2)
    return F.pad(x, (0, -width % multiple, 0, -height % multiple))


def _warp(x: torch.Tensor, motion: torch.Tensor) -> torch.Tensor:
    """The values at the places that a motion in pixels leads to; beyond a border, those of the border: F.grid_sample
    with align_corners. Rows of all channels are taken at once."""
    batch, channels, height, width = x.shape
    column = (torch.arange(width, device=x.device) + motion[:, 0]).clamp(0, width - 1)
    row = (torch.arange(height, device=x.device)[:, None] + motion[:, 1]).clamp(0, height - 1)
    left, top = column.floor().clamp(max=width - 2), row.floor().clamp(max=height - 2)
    image = torch.arange(batch, device=x.device).view(-1, 1, 1) * (height * width)
    corner = (image + top.int() * width + left.int()).flatten()
    values = x.permute(0, 2, 3, 1).reshape(-1, channels)
    places = torch.cat([corner, corner + 1, corner + width, corner + width + 1])
    taken = values.index_select(0, places).unflatten(0, (4, batch, height, width))
    across, down = (column - left).unsqueeze(-1), (row - top).unsqueeze(-1)
    upper, lower = (taken[at] * (1 - across) + taken[at + 1] * across for at in (0, 2))
    return (upper * (1 - down) + lower * down).permute(0, 3, 1, 2)


def read_ifnet(source: WeightSource) -> tuple[WeightSource, dict[str, Any]]:
    """The tensors under the module's names, and its configuration from their shapes. Raises CheckpointError for a file
    of another kind."""
    wanted = "encode.cnn3.weight"
    prefix = next((prefix for prefix in _PREFIXES if prefix + wanted in source.tensors), None)
    if prefix is None or f"{prefix}block{_BLOCKS - 1}.conv0.1.0.weight" not in source.tensors:
        raise CheckpointError(
            f"{source.path} holds no network that is read here: it has {join_names(list(source.tensors), 3)}; use a "
            "safetensors file of RIFE 4.25 or 4.26, such as rife_v4.26.safetensors"
        )
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in record_tensors(source).items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_UNUSED)
    }
    try:
        widths = [int(tensors[f"block{number}.conv0.1.0.weight"].shape[0]) for number in range(_BLOCKS)]
        feature_width, features = map(int, tensors[wanted].shape[:2])
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{source.path} is not a whole network ({type(error).__name__}: {error}); download it again"
        ) from error
    scales = _LITE_SCALES if widths[-1] == _LITE_WIDTH else _SCALES
    config = {
        "widths": widths,
        "feature_width": feature_width,
        "features": features,
        "scales": list(scales),
        "multiple": scales[0] * _STRIDE,
    }
    return RecordedSource(source, tensors), config
