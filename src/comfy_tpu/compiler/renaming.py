"""A checkpoint whose names have a prefix that the module's have not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.compiler.weights import WeightSource


class _Renamed:
    def __init__(self, source: WeightSource, prefix: str) -> None:
        self._source = source
        self._names = {name.removeprefix(prefix): name for name in source.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: dataclasses.replace(source.tensors[full], name=name) for name, full in self._names.items()
        }

    @property
    def path(self) -> Path:
        return self._source.path

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(self._names[name])

    def close(self) -> None:
        self._source.close()


def without_prefix(source: WeightSource, prefix: str) -> WeightSource:
    """The source with names as if it never had the prefix; itself where no name has it."""
    if not prefix or not any(name.startswith(prefix) for name in source.tensors):
        return source
    return _Renamed(source, prefix)
