"""Loads diffusers' checkpoints into a channels-last model: names and layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from comfy_tpu.compiler.weights import SourceWrapper, WeightSource

_LEAVES = {"kernel": "weight", "scale": "gamma", "bias": "bias"}


def checkpoint_name(path: tuple[Hashable, ...]) -> str:
    """diffusers' name of a parameter of the Flax model."""
    *owner, leaf = map(str, path)
    if owner[-1] == "resample":  # diffusers' second step: the first only repeats or pads pixels
        owner.append("1")
    return ".".join((*owner, _LEAVES[leaf]))


class ChannelsLast(SourceWrapper):
    """A checkpoint whose tensors are converted to channels last."""

    def __init__(self, source: WeightSource) -> None:
        infos = source.tensors.items()
        laid_out = {name: channels_last(name, torch.empty(info.shape, device="meta")) for name, info in infos}
        super().__init__(
            source, {name: dataclasses.replace(info, shape=tuple(laid_out[name].shape)) for name, info in infos}
        )

    def read(self, name: str) -> torch.Tensor:
        return channels_last(name, super().read(name))


def channels_last(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[out, in, *kernel] -> [*kernel, in, out], or [in, out] where the kernel is one pixel; a norm's gains flat."""
    if name.endswith(".gamma"):
        return tensor.flatten()
    if tensor.ndim < 2:
        return tensor
    moved = tensor.movedim((1, 0), (-2, -1))
    return moved.reshape(moved.shape[-2:]) if moved.shape[:-2].numel() == 1 else moved
