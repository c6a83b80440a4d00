"""Weights in 8 bits: which layers get them, and how they are made of a checkpoint's own while it is read."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence

import torch

from comfy_tpu.bridge.quantized import QuantizedLinear
from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.compiler.weights import SourceAround, WeightSource
from comfy_tpu.config import Quantization
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels.quantized import LARGEST

DTYPES: Mapping[Quantization, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE = "_scale"
"""A weight's scales are called like the weight, and this."""


def quantize_layers(module: torch.nn.Module, layers: Sequence[str], kind: Quantization) -> None:
    """Puts 8-bit layers in place of those that the globs name."""
    if kind == "none":
        return
    if kind not in DTYPES:
        raise InvalidValueError(
            f"quantize={kind!r} is unknown; choose from none, {', '.join(DTYPES)}", field="quantize"
        )
    chosen = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear) and any(fnmatch.fnmatchcase(name, pattern) for pattern in layers)
    }
    for name, linear in chosen.items():
        home, _, own = name.rpartition(".")
        setattr(module.get_submodule(home), own, QuantizedLinear(linear, DTYPES[kind]))


class QuantizedSource(SourceAround):
    """A checkpoint in which some weights are 8-bit ones with a scale for every output feature.

    They are made as they are read, so that neither the host nor a device ever holds the model in its own dtype.
    """

    def __init__(self, source: WeightSource, weights: Collection[str], kind: Quantization) -> None:
        self._dtype = DTYPES[kind]
        self._weights = frozenset(weights)
        self._last: tuple[str, tuple[torch.Tensor, torch.Tensor]] | None = None
        tensors: dict[str, TensorInfo] = {}
        for name, info in source.tensors.items():
            if name in self._weights:
                # The scales beside it: both are made of one reading.
                scales = dataclasses.replace(info, name=name + SCALE, shape=info.shape[:1], dtype=torch.float32)
                tensors |= {name: dataclasses.replace(info, dtype=self._dtype), name + SCALE: scales}
            else:
                tensors[name] = info
        super().__init__(source, tensors)

    def read(self, name: str) -> torch.Tensor:
        weight = name.removesuffix(SCALE)
        if weight not in self._weights:
            return super().read(name)
        if self._last is None or self._last[0] != weight:
            self._last = (weight, quantized(super().read(weight), self._dtype))
        small, scale = self._last[1]
        return small if name == weight else scale

    def close(self) -> None:
        self._last = None
        super().close()


def quantized(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, features] -> the same in 8 bits, and [outputs] scales."""
    largest = LARGEST[str(dtype).removeprefix("torch.")]
    values = weight.float()
    scale = (values.abs().amax(dim=1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (values / scale[:, None]).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale
