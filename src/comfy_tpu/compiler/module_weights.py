"""The weights of a component as its module declares them: names, shapes, dtypes, and names in the checkpoint."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from comfy_tpu.bridge import weight_shapes
from comfy_tpu.bridge.dtypes import numpy_dtype
from comfy_tpu.compiler.quantization import SCALE_SUFFIX
from comfy_tpu.compiler.stacking import split_layer_name, stacked_blocks
from comfy_tpu.compiler.stored.identity import hash_module_sources


@dataclasses.dataclass(frozen=True)
class ModuleWeights:
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """By name; stacked weights have a leading layer dimension."""
    blocks: Mapping[str, tuple[str, ...]]
    """The name prefix of each stack -> the checkpoint's prefixes of its layers."""
    code: Mapping[str, str]
    """Hashes of the source files of the module's classes, by the full names of their Python modules."""

    @classmethod
    def of(cls, module: torch.nn.Module, dtype: torch.dtype, float32: Sequence[str]) -> ModuleWeights:
        """`dtype`: that of floating weights, but for those that match a glob of `float32`, and 8-bit ones."""
        blocks, shapes = stacked_blocks(module), {}
        for name, tensor in weight_shapes(module).items():
            layers = split_layer_name(name, blocks)
            leading = (len(layers),) if layers != (name,) else ()
            shapes[name] = jax.ShapeDtypeStruct(leading + tuple(tensor.shape), _dtype(name, tensor, dtype, float32))
        return cls(shapes, blocks, hash_module_sources(_source_modules(module)))

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> ModuleWeights:
        shapes = {
            name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype)) for name, shape, dtype in written["weights"]
        }
        return cls(shapes, {prefix: tuple(layers) for prefix, layers in written["blocks"].items()}, written["code"])

    def write(self) -> dict[str, Any]:
        """JSON data, for `read`."""
        weights = [[name, list(each.shape), each.dtype.name] for name, each in self.shapes.items()]
        return {"weights": weights, "blocks": dict(self.blocks), "code": dict(self.code)}

    @staticmethod
    def is_current(written: Mapping[str, Any]) -> bool:
        """Whether the source of the module's classes is what it was."""
        return hash_module_sources(written["code"]) == written["code"]

    def sources(self, name: str) -> tuple[str, ...]:
        """The checkpoint's names of a weight: one for each layer of a stacked one."""
        return split_layer_name(name, self.blocks)


def _dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype, float32: Sequence[str]) -> np.dtype:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
        return numpy_dtype(tensor.dtype)
    keeps_float32 = any(fnmatch.fnmatchcase(name, pattern) for pattern in (*float32, f"*{SCALE_SUFFIX}"))
    return numpy_dtype(torch.float32 if keeps_float32 else dtype)


def _source_modules(module: torch.nn.Module) -> set[str]:
    """The Python modules that define the classes of a module's parts, their bases, and their attention processors."""
    names = {kind.__module__ for kind in _classes(module)}
    return {name for name in names if name.partition(".")[0] not in ("builtins", "torch", "comfy_tpu", "abc", "typing")}


def _classes(module: torch.nn.Module) -> set[type]:
    parts = [*module.modules(), *(part.processor for part in module.modules() if hasattr(part, "processor"))]
    return {kind for part in parts for kind in type(part).__mro__}


_LIBRARIES = ("accelerate", "comfy_tpu", "diffusers", "huggingface_hub", "torch", "transformers")
"""Packages that add to each other's classes when they are imported: transformers gives torch's Module a method."""


def find_foreign_code(module: torch.nn.Module) -> str:
    """A method of the module's classes that another package has replaced, as "Class.method"; "" if there is none.

    A program that is traced with it is not that of the class's own source.
    """
    libraries = {_directory(name) for name in (*_LIBRARIES, "os")}
    for kind in _classes(module):
        known = tuple(filter(None, libraries | {_directory(kind.__module__.partition(".")[0])}))
        for name, method in vars(kind).items():
            code = getattr(getattr(method, "__func__", method), "__code__", None)
            if isinstance(method, functools.partial | functools.partialmethod):
                return f"{kind.__qualname__}.{name}"
            if code is not None and not code.co_filename.startswith((*known, "<")):
                return f"{kind.__qualname__}.{name}"
    return ""


def _directory(package: str) -> str:
    """The directory of an imported package or module; "" if there is none."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).parent) if file else ""
