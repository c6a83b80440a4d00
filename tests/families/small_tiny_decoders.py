"""Files of tiny decoders with random weights, and what they decode to, in plain PyTorch from the published description.

The reference runs on a whole video, layer by layer, with its own loops over frames: nothing of it streams.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def _weight(random: torch.Generator, outputs: int, inputs: int, side: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, side, side, generator=random) / math.sqrt(inputs * side**2) * 1.4


class Weights:
    """Makes tensors by the names of the published files."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.tensors: Tensors = {}

    def add(self, name: str, outputs: int, inputs: int, side: int = 3, *, bias: bool = True) -> None:
        self.tensors[f"{name}.weight"] = _weight(self.random, outputs, inputs, side)
        if bias:
            self.tensors[f"{name}.bias"] = torch.randn(outputs, generator=self.random) * 0.1

    def add_block(self, name: str, width: int, inputs: int) -> None:
        self.add(f"{name}.conv.0", width, inputs)
        self.add(f"{name}.conv.2", width, width)
        self.add(f"{name}.conv.4", width, width)


def video_tensors(
    channels: int, *, widths: Sequence[int] = (12, 8, 8, 4), strides: Sequence[int] = (1, 2, 2), patch: int = 1
) -> Tensors:
    """The decoder of TAEHV, and one tensor of its encoder."""
    made = Weights(1)
    made.add("decoder.1", widths[0], channels)
    for level, place in enumerate((3, 9, 15)):
        for number in range(place, place + 3):
            made.add_block(f"decoder.{number}", widths[level], 2 * widths[level])
        made.add(f"decoder.{place + 4}.conv", widths[level] * strides[level], widths[level], 1, bias=False)
        made.add(f"decoder.{place + 5}", widths[level + 1], widths[level], bias=False)
    made.add("decoder.22", 3 * patch**2, widths[3])
    made.add("encoder.0", 64, 3 * patch**2)
    return made.tensors


def wide_video_tensors(
    channels: int, *, widths: Sequence[int] = (12, 8, 8, 4), strides: Sequence[int] = (1, 2, 2), patch: int = 1
) -> Tensors:
    """The decoder of the files named "super"."""
    made = Weights(2)
    made.add("decoder.0", widths[0], channels, 1, bias=False)
    for level, place in enumerate((1, 8, 15)):
        width, following = widths[level], widths[level + 1]
        for number in range(place, place + 3):
            made.tensors[f"decoder.{number}.conv.0.weight"] = _weight(made.random, 2 * width, 1, 7)
            made.add(f"decoder.{number}.conv.1", 4 * width, 2 * width, 1)
            made.add(f"decoder.{number}.conv.3", width, 4 * width, 1, bias=False)
        made.add(f"decoder.{place + 3}", 4 * following, width)
        made.add(f"decoder.{place + 6}.conv", following * strides[level], following, 1, bias=False)
    made.add("decoder.22", 3 * patch**2, widths[3])
    return made.tensors


def image_tensors(channels: int, *, width: int = 8, pools: bool = False) -> Tensors:
    """TAESD's own decoder file."""
    made = Weights(3)
    made.add("1", width, channels)
    for number in (3, 4, 5, 8, 9, 10, 13, 14, 15, 18):
        made.add_block(str(number), width, width)
        if pools and number < 6:
            made.add(f"{number}.pool.0", 4 * width, width, 1, bias=False)
            made.tensors[f"{number}.pool.1.weight"] = torch.rand(4 * width, generator=made.random) + 0.5
            made.tensors[f"{number}.pool.1.bias"] = torch.randn(4 * width, generator=made.random) * 0.1
            made.add(f"{number}.pool.3", width, 4 * width, 1, bias=False)
    for number in (7, 12, 17):
        made.add(str(number), width, width, bias=False)
    made.add("19", 3, width)
    return made.tensors


def as_diffusers(tensors: Tensors) -> Tensors:
    """A decoder file of TAESD under diffusers' names."""
    parts = {name: name.split(".", 1) for name in tensors}
    return {f"decoder.layers.{int(number) - 1}.{rest}": tensors[name] for name, (number, rest) in parts.items()}


def save(path: Path, tensors: Tensors) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def _convolve(tensors: Tensors, name: str, x: torch.Tensor, **options: int) -> torch.Tensor:
    weight = tensors[f"{name}.weight"]
    return F.conv2d(x, weight, tensors.get(f"{name}.bias"), padding=weight.shape[-1] // 2, **options)


def _three(tensors: Tensors, name: str, x: torch.Tensor, slope: float) -> torch.Tensor:
    for number in (0, 2):
        x = F.leaky_relu(_convolve(tensors, f"{name}.conv.{number}", x), slope)
    return _convolve(tensors, f"{name}.conv.4", x)


def _grow(tensors: Tensors, name: str, frames: list[torch.Tensor]) -> list[torch.Tensor]:
    grown = [_convolve(tensors, f"{name}.conv", frame) for frame in frames]
    return [part for frame in grown for part in frame.split(tensors[f"{name}.conv.weight"].shape[1], dim=1)]


def decode_video(
    tensors: Tensors, latents: torch.Tensor, *, patch: int = 1, slope: float = 0.0, signed: bool = False
) -> torch.Tensor:
    """[1, channels, n, height, width] -> [1, frames, height, width, 3]."""
    frames = [_convolve(tensors, "decoder.1", torch.tanh(latents[:, :, n] / 3) * 3) for n in range(latents.shape[2])]
    frames = [F.leaky_relu(frame, slope) for frame in frames]
    for place in (3, 9, 15):
        for number in range(place, place + 3):
            pairs = zip(frames, [torch.zeros_like(frames[0]), *frames], strict=False)
            made = [_three(tensors, f"decoder.{number}", torch.cat(pair, dim=1), slope) + pair[0] for pair in pairs]
            frames = [F.leaky_relu(frame, slope) for frame in made]
        frames = [frame.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3) for frame in frames]
        frames = _grow(tensors, f"decoder.{place + 4}", frames)
        frames = [_convolve(tensors, f"decoder.{place + 5}", frame) for frame in frames]
    frames = [_convolve(tensors, "decoder.22", F.leaky_relu(frame, slope)) for frame in frames]
    return _finish(frames, len(frames) // latents.shape[2], patch, signed)


def decode_wide_video(tensors: Tensors, latents: torch.Tensor, *, patch: int = 1) -> torch.Tensor:
    frames = [_convolve(tensors, "decoder.0", latents[:, :, n]) for n in range(latents.shape[2])]
    for place in (1, 8, 15):
        for number in range(place, place + 3):
            made = []
            for frame, before in zip(frames, [torch.zeros_like(frames[0]), *frames], strict=False):
                name, pair = f"decoder.{number}.conv", torch.cat((frame, before), dim=1)
                hidden = _convolve(tensors, f"{name}.0", pair, groups=pair.shape[1])
                made.append(_convolve(tensors, f"{name}.3", _convolve(tensors, f"{name}.1", hidden).relu()) + frame)
            frames = made
        frames = [F.pixel_shuffle(_convolve(tensors, f"decoder.{place + 3}", frame).relu(), 2) for frame in frames]
        frames = _grow(tensors, f"decoder.{place + 6}", frames)
    frames = [_convolve(tensors, "decoder.22", frame) for frame in frames]
    return _finish(frames, len(frames) // latents.shape[2], patch, False)


def _finish(frames: list[torch.Tensor], scale: int, patch: int, signed: bool) -> torch.Tensor:
    """Without the frames before the first one."""
    video = torch.stack([F.pixel_shuffle(frame, patch) for frame in frames[scale - 1 :]], dim=1)
    return (video / 2 + 0.5 if signed else video).clamp(0, 1).permute(0, 1, 3, 4, 2)


def decode_image(tensors: Tensors, latents: torch.Tensor, *, patch: int = 1) -> torch.Tensor:
    """[1, channels, 1, height, width] -> [1, 1, height, width, 3]."""
    x = latents[:, :, 0]
    if patch > 1:
        blocks = x.view(1, -1, patch, patch, *x.shape[2:])
        x = torch.stack(
            [torch.stack([blocks[:, :, i, j] for j in range(patch)], dim=-1) for i in range(patch)], dim=-3
        )  # [1, channels, height, patch, width, patch]
        x = x.reshape(1, x.shape[1], x.shape[2] * patch, -1)
    x = _convolve(tensors, "1", torch.tanh(x / 3) * 3).relu()
    for place in (3, 8, 13):
        for number in range(place, place + 3):
            x = _image_block(tensors, str(number), x)
        x = _convolve(tensors, str(place + 4), x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
    return _convolve(tensors, "19", _image_block(tensors, "18", x)).clamp(0, 1).permute(0, 2, 3, 1).unsqueeze(1)


def _image_block(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    if f"{name}.pool.0.weight" in tensors:
        scale, shift = tensors[f"{name}.pool.1.weight"], tensors[f"{name}.pool.1.bias"]
        hidden = F.group_norm(_convolve(tensors, f"{name}.pool.0", x), 4, scale, shift).relu()
        x = x + _convolve(tensors, f"{name}.pool.3", hidden)
    return (_three(tensors, name, x, 0.0) + x).relu()
