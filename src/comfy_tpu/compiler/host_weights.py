"""The weights of a module in host memory, read like a checkpoint, and detection of those that changed."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from comfy_tpu.bridge import named_parts, named_tensors, weight_shapes
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
        self._recorded: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, bytes]] | None] = {}
        """By name, and None for tensors that a checkpoint does not hold."""

    def find_changed(self, module: torch.nn.Module) -> set[str]:
        """The names of tensors that changed since the last `record`."""
        changed = set()
        for name, tensor in named_tensors(named_parts(module)).items():
            if name not in self._recorded:
                return self._compare_all(module)
            recorded = self._recorded[name]
            if recorded is not None and not _is_unchanged(recorded, tensor):
                changed.add(name)
        return changed

    def _compare_all(self, module: torch.nn.Module) -> set[str]:
        """Slower: asks the module itself which tensors a checkpoint holds."""
        recorded = {name: each for name, each in self._recorded.items() if each is not None}
        return {
            name
            for name, tensor in weight_shapes(module).items()
            if name not in recorded or not _is_unchanged(recorded[name], tensor)
        }

    def record(self, module: torch.nn.Module) -> None:
        weights = weight_shapes(module)
        self._recorded = {
            name: (weakref.ref(tensor), _version(tensor)) if name in weights else None
            for name, tensor in named_tensors(named_parts(module)).items()
        }


def device_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor on the devices: int32 for int64, which JAX does not hold (a BatchNorm's count)."""
    if _is_quantized(tensor):
        return torch.float32  # or what the component computes in; its own dtype may be that of the rounded numbers
    return torch.int32 if tensor.dtype == torch.int64 else tensor.dtype


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is ComfyUI's subclass for quantized weights, which holds the 8-bit numbers in `_qdata`."""
    return hasattr(tensor, "_qdata")


def _is_unchanged(recorded: tuple[weakref.ref[torch.Tensor], tuple[int, bytes]], tensor: torch.Tensor) -> bool:
    reference, version = recorded
    return reference() is tensor and version == _version(tensor)


_SAMPLES = 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_bytes_type = functools.cache(lambda nbytes: ctypes.c_char * nbytes)  # making such a type takes as long as all the rest


def _version(tensor: torch.Tensor) -> tuple[int, bytes]:
    """torch's count of writes, and two bytes of a few values.

    torch does not count writes through `.data`, nor into tensors made in inference mode, as ComfyUI's are. Values are
    read straight from memory, because this runs for a thousand tensors at every step.
    """
    counted = 0 if tensor.is_inference() else tensor._version
    values: torch.Tensor = tensor if type(tensor) in _PLAIN else getattr(tensor, "_qdata", tensor)
    if not values.is_cpu or not values.is_contiguous() or not values.numel():
        return counted, b""
    size, count = values.itemsize, values.numel()
    # Of a floating-point number the first two bytes: of a rounded one, the last are zeros whatever it is.
    place, step = max(0, size - 2) if values.is_floating_point() else 0, max(1, count // _SAMPLES) * size
    memory = _bytes_type(count * size).from_address(values.data_ptr())
    return counted, memory[place::step] + memory[place + 1 :: step]
