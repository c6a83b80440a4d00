"""The weights of a module in host memory, read like a checkpoint, and detection of those that changed."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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

    A write escapes that torch does not count, into a tensor of more than 16 KB, where it misses the sample: less than
    1 % of the rows or columns (a third, unless looked at closely), or single values. So does any such write into a
    tensor that is not in CPU memory.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, _Mark | None] = {}
        """By name, and None for tensors that a checkpoint does not hold."""

    def find_changed(self, module: torch.nn.Module, *, closely: bool = True) -> set[str]:
        """The names of tensors that changed since the last `record`. `closely`: also where a small part was written to
        in a way that torch does not count (`_version`)."""
        changed = set()
        for name, tensor in named_tensors(named_parts(module)).items():
            if name not in self._recorded:
                return self._compare_all(module, closely)
            recorded = self._recorded[name]
            if recorded is not None and not _is_unchanged(recorded, tensor, closely):
                changed.add(name)
        return changed

    def _compare_all(self, module: torch.nn.Module, closely: bool) -> set[str]:
        """Slower: asks the module itself which tensors a checkpoint holds."""
        recorded = {name: each for name, each in self._recorded.items() if each is not None}
        return {
            name
            for name, tensor in weight_shapes(module).items()
            if name not in recorded or not _is_unchanged(recorded[name], tensor, closely)
        }

    def record(self, module: torch.nn.Module) -> None:
        weights = weight_shapes(module)
        self._recorded = {
            name: _Mark(weakref.ref(tensor), *(_version(tensor, count) for count in (_FEW, _MANY)))
            if name in weights
            else None
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


class _Mark(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    few: tuple[int, bytes]
    """The tensor's `_version` by a few values."""
    many: tuple[int, bytes]


def _is_unchanged(mark: _Mark, tensor: torch.Tensor, closely: bool) -> bool:
    if mark.tensor() is not tensor:
        return False
    return mark.many == _version(tensor, _MANY) if closely else mark.few == _version(tensor, _FEW)


_FEW = 8
_MANY = 512
"""Values in a sample. 512 meet every write to 1 % of the rows or columns of a weight, 8 to a third. To look at a value
costs a page of memory, or of the file that it is mapped from: all rows of all weights would be most of a model."""
_WHOLE = 16 * 1024
"""Bytes up to which a tensor is compared whole: biases, norms and scales, of which no sample would meet every part."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by their bytes: torch indexes no float8."""
_bytes_type = functools.cache(lambda nbytes: ctypes.c_char * nbytes)  # making such a type takes as long as all the rest


def _version(tensor: torch.Tensor, samples: int) -> tuple[int, bytes]:
    """torch's count of writes, and about as many values as bytes.

    torch does not count writes through `.data`, nor into tensors made in inference mode, as ComfyUI's are. Values are
    read straight from memory, because this runs for a thousand tensors at every step.
    """
    counted = 0 if tensor.is_inference() else tensor._version
    values: torch.Tensor = tensor if type(tensor) in _PLAIN else getattr(tensor, "_qdata", tensor)
    if not values.is_cpu or not values.numel():
        return counted, b""
    size, count = values.itemsize, values.numel()
    step = max(1, count // samples)
    # Not a multiple of the columns, which would meet one of them alone: by the golden ratio it meets all evenly.
    step -= int(0.382 * min(step, count // values.shape[0])) if values.ndim > 1 else 0
    if count * size <= _WHOLE:
        step = 1
    if not values.is_contiguous():  # they are few: 0.2 ms each
        places = torch.unravel_index(torch.arange(0, count, step), values.shape)
        plain = values.detach().as_subclass(torch.Tensor)
        return counted, plain.view(_BITS.get(size, plain.dtype))[places].numpy().tobytes()
    memory = _bytes_type(count * size).from_address(values.data_ptr())
    if step == 1:
        return counted, memory.raw
    return counted, b"".join(memory[byte :: step * size] for byte in range(size))
