"""Single files as ComfyUI's model folders hold them: a part under a model directory's names, its fp8 scales applied."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.recorded_tensors import RecordedSource, Tensors, record_tensors
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.errors import CheckpointError, join_names

Convert = Callable[[Tensors, Mapping[str, Any]], Tensors]
"""(tensors under the original names, the part's configuration) -> tensors under diffusers' names. May change its
argument. Data may not be looked at: the tensors have none."""

_SCALES = (".scale_weight", ".weight_scale")
_QUANTIZATION_KEYS = ("scaled_fp8", "*.scale_input", "*.input_scale", "*.comfy_quant")


@dataclasses.dataclass(frozen=True)
class PartFile:
    """How a part of a model is recognised in a single file, and how its names become those of a model directory."""

    own: str
    """A tensor that each file with the names of a model directory holds."""
    original: str = ""
    """A tensor that each file with the original authors' names holds. Empty: those names are the same."""
    convert: Convert = lambda tensors, config: tensors
    """From the original names. Not called for files with the names of a model directory."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of all tensors of the part. Where a file has one, its other tensors belong to other parts."""
    ignored: tuple[str, ...] = ()
    """Globs of tensors that a file may hold and the part does not need."""
    required: tuple[str, ...] = ()
    """Tensors that each file holds under either names, where `own` and `original` are also names of other parts."""
    foreign: tuple[str, ...] = ()
    """Tensors of other parts that `own` and `original` are also names of, and that no file of this part holds."""

    @property
    def expected(self) -> str:
        """The tensors by which a file is recognised, for errors."""
        required = f" with {' and '.join(self.required)}" if self.required else ""
        foreign = f" without {' and '.join(self.foreign)}" if self.foreign else ""
        return " or ".join(name for name in (self.own, self.original) if name) + required + foreign

    def matches(self, source: WeightSource) -> bool:
        return self._prefix(source) is not None

    def open(self, source: WeightSource, config: Mapping[str, Any], what: str) -> WeightSource:
        """The part's tensors under the names of a model directory. `what`: the part's name for errors."""
        prefix = self._prefix(source)
        if prefix is None:
            raise CheckpointError(self.mismatch(source, what))
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in record_tensors(source).items()
            if name.startswith(prefix) and not _matches_any(name.removeprefix(prefix), self.ignored)
        }
        tensors = _apply_scales(tensors, source.path)
        if self.own not in tensors:
            try:
                tensors = self.convert(tensors, config)
            except (KeyError, IndexError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"{source.path} is not a whole {what}: its names cannot be converted ({type(error).__name__}: "
                    f"{error}); download it again"
                ) from error
        return RecordedSource(source, tensors)

    def mismatch(self, source: WeightSource, what: str) -> str:
        return (
            f"{source.path} holds no {what}: it has {join_names(list(source.tensors), 3)}, expected {self.expected}; "
            f"choose the file of the {what}"
        )

    def _prefix(self, source: WeightSource) -> str | None:
        for prefix in (*self.prefixes, ""):
            if (
                any(name and prefix + name in source.tensors for name in (self.own, self.original))
                and all(prefix + name in source.tensors for name in self.required)
                and not any(prefix + name in source.tensors for name in self.foreign)
            ):
                return prefix
        return None


def open_single_file(path: Path) -> Checkpoint:
    """A safetensors file, its header read. Raises CheckpointError for directories, GGUF files and pickles."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; give one .safetensors file")
    return Checkpoint.open(path)


def _apply_scales(tensors: Tensors, path: Path) -> Tensors:
    """The tensors with fp8 weights multiplied by their scales, in bfloat16, and without the scales."""
    kept = {name: tensor for name, tensor in tensors.items() if not _matches_any(name, _QUANTIZATION_KEYS)}
    for name in list(kept):
        suffix = next((suffix for suffix in _SCALES if name.endswith(suffix)), None)
        if suffix is None:
            continue
        scale, weight = kept.pop(name), name.removesuffix(suffix) + ".weight"
        if (
            weight not in kept
            or not kept[weight].is_floating_point()
            or scale.numel() not in (1, kept[weight].shape[0])
        ):
            raise CheckpointError(
                f"{path} is quantized in a way that is not read here ({name}); use the model's file in bf16, fp16 or "
                "fp8"
            )
        column = scale.float().reshape(-1, *(1,) * (kept[weight].ndim - 1))
        # In float32, then rounded once: eight bits of fp8 are exact in it.
        kept[weight] = (kept[weight].float() * column).to(torch.bfloat16)
    if packed := [name for name, tensor in kept.items() if name.endswith(".weight") and not tensor.is_floating_point()]:
        raise CheckpointError(
            f"{path} holds {packed[0]} as {str(kept[packed[0]].dtype).removeprefix('torch.')}, a quantization that is "
            "not read here; use the model's file in bf16, fp16 or fp8"
        )
    return kept


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
