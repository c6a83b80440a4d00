"""The weights of a module in host memory, read like a checkpoint, and detection of those that changed."""

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
    """A `WeightSource` over a module's current tensors."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.path = Path(type(module).__name__)
        self._tensors = weight_shapes(module)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tuple(tensor.shape), device_dtype(tensor), self.path)
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
        """Does nothing: there is no file to close."""


class WeightChangeDetector:
    """Finds the tensors of a module that were replaced or written to since the last `record`.

    Code that patches weights (ComfyUI's LoRA) replaces tensors, and restores the original ones later.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, list[bytes]]]] = {}

    def find_changed(self, module: torch.nn.Module) -> set[str]:
        """The names of tensors that changed since the last `record`."""
        return {name for name, tensor in weight_shapes(module).items() if not self._is_unchanged(name, tensor)}

    def record(self, module: torch.nn.Module) -> None:
        self._recorded = {
            name: (weakref.ref(tensor), _version(tensor)) for name, tensor in weight_shapes(module).items()
        }

    def _is_unchanged(self, name: str, tensor: torch.Tensor) -> bool:
        reference, version = self._recorded.get(name, (None, None))
        return reference is not None and reference() is tensor and version == _version(tensor)


def device_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor on the devices: int32 for int64, which JAX does not hold (a BatchNorm's count)."""
    if _is_quantized(tensor):
        return torch.float32  # or what the component computes in; its own dtype may be that of the rounded numbers
    return torch.int32 if tensor.dtype == torch.int64 else tensor.dtype


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is ComfyUI's subclass for quantized weights, which holds the 8-bit numbers in `_qdata`."""
    return hasattr(tensor, "_qdata")


_SAMPLES = 8


def _version(tensor: torch.Tensor) -> tuple[int, list[bytes]]:
    """torch's count of writes, and a few sampled values.

    torch does not count writes through `.data`, nor into tensors made in inference mode, as ComfyUI's are. Values are
    read straight from memory, because this runs for a thousand tensors at every step.
    """
    counted = 0 if tensor.is_inference() else tensor._version
    values: torch.Tensor = getattr(tensor, "_qdata", tensor)
    if values.device.type != "cpu" or not values.is_contiguous():
        return counted, []
    size, start = values.itemsize, values.data_ptr()
    places = range(0, values.numel() * size, max(1, values.numel() // _SAMPLES) * size)
    return counted, [ctypes.string_at(start + place, size) for place in places]
