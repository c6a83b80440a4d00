"""The weights of a module that lives in host memory, read like a checkpoint; and which of them changed since."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from comfy_tpu.bridge import weight_shapes
from comfy_tpu.bridge.dtypes import check_integer_range
from comfy_tpu.compiler.checkpoint import TensorInfo


class HostWeights:
    """A `WeightSource` over the tensors that a module has at this moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.path = Path(type(module).__name__)
        self._tensors = weight_shapes(module)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tuple(tensor.shape), held_as(tensor), self.path)
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        tensor = tensor.dequantize() if _is_quantized(tensor) else tensor
        if tensor.dtype != torch.int64:
            return tensor
        check_integer_range(tensor.numpy())
        return tensor.to(torch.int32)

    def close(self) -> None:
        """Nothing to close; a checkpoint has."""


class WeightWatch:
    """Which tensors of a module were replaced or written to since it was looked at last.

    Whoever patches weights (ComfyUI's LoRA) puts new tensors in their place, and the old ones back later.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, list[bytes]]]] = {}

    def changed(self, module: torch.nn.Module) -> set[str]:
        """Names whose tensor is another one than at the last `remember`."""
        return {name for name, tensor in weight_shapes(module).items() if not self._is_seen(name, tensor)}

    def remember(self, module: torch.nn.Module) -> None:
        self._seen = {name: (weakref.ref(tensor), _version(tensor)) for name, tensor in weight_shapes(module).items()}

    def _is_seen(self, name: str, tensor: torch.Tensor) -> bool:
        reference, version = self._seen.get(name, (None, None))
        return reference is not None and reference() is tensor and version == _version(tensor)


def held_as(tensor: torch.Tensor) -> torch.dtype:
    """JAX holds no int64 unless the whole process is set to 64 bits. A BatchNorm counts its batches in one."""
    if _is_quantized(tensor):
        return torch.float32  # or what the component computes in; its own dtype may be that of the rounded numbers
    return torch.int32 if tensor.dtype == torch.int64 else tensor.dtype


def _is_quantized(tensor: torch.Tensor) -> bool:
    """ComfyUI keeps quantized weights as a tensor subclass that knows how to undo it, around the numbers themselves."""
    return hasattr(tensor, "_qdata")


_SAMPLED = 8


def _version(tensor: torch.Tensor) -> tuple[int, list[bytes]]:
    """torch counts writes, but not those through `.data`, and none into tensors made in inference mode, as ComfyUI's
    are: a few of the values tell. Straight from memory, because this is asked of a thousand tensors at every step."""
    counted = 0 if tensor.is_inference() else tensor._version
    values: torch.Tensor = getattr(tensor, "_qdata", tensor)
    if values.device.type != "cpu" or not values.is_contiguous():
        return counted, []
    size, start = values.itemsize, values.data_ptr()
    places = range(0, values.numel() * size, max(1, values.numel() // _SAMPLED) * size)
    return counted, [ctypes.string_at(start + place, size) for place in places]
