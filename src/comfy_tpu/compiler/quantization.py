"""8-bit weights: which layers get them, and how they are quantized while a checkpoint is read."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence

import torch

from comfy_tpu.bridge.quantized import QuantizedLinear
from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.compiler.weights import SourceWrapper, WeightSource
from comfy_tpu.config import Quantization
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels.quantized import LARGEST

DTYPES: Mapping[Quantization, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_SUFFIX = "_scale"
"""The name of a weight's scales is the weight's name with this suffix."""


def quantize_layers(module: torch.nn.Module, layers: Sequence[str], kind: Quantization) -> None:
    """Replaces the linear layers that match the globs by 8-bit layers."""
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


class QuantizedSource(SourceWrapper):
    """A checkpoint in which some weights are 8-bit, with a scale for every output feature.

    Weights are quantized as they are read, so that neither the host nor a device holds the model in its own dtype.
    """

    def __init__(self, source: WeightSource, weights: Collection[str], kind: Quantization) -> None:
        self._dtype = DTYPES[kind]
        self._weights = frozenset(weights)
        self._last: tuple[str, tuple[torch.Tensor, torch.Tensor]] | None = None
        tensors: dict[str, TensorInfo] = {}
        for name, info in source.tensors.items():
            if name in self._weights:
                # The scales beside it: both are made of one reading.
                scales = dataclasses.replace(info, name=name + SCALE_SUFFIX, shape=info.shape[:1], dtype=torch.float32)
                tensors |= {name: dataclasses.replace(info, dtype=self._dtype), name + SCALE_SUFFIX: scales}
            else:
                tensors[name] = info
        super().__init__(source, tensors)

    def read(self, name: str) -> torch.Tensor:
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight not in self._weights:
            return super().read(name)
        if self._last is None or self._last[0] != weight:
            self._last = (weight, quantize_weight(super().read(weight), self._dtype))
        small, scale = self._last[1]
        return small if name == weight else scale

    def close(self) -> None:
        self._last = None
        super().close()


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, features] -> the weight in 8 bits, and [outputs] scales."""
    largest = LARGEST[str(dtype).removeprefix("torch.")]
    values = weight.float()
    scale = (values.abs().amax(dim=1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (values / scale[:, None]).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale
