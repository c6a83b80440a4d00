"""The names and shapes of published checkpoints and LoRAs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from comfy_tpu.compiler.checkpoint import _DTYPES, TensorInfo

PUBLISHED = Path(__file__).parents[2] / "shared" / "published"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs ../shared/published")

Tensors = dict[str, TensorInfo]


@dataclasses.dataclass(frozen=True)
class ListSource:
    """A checkpoint of which the header is known and nothing else."""

    tensors: Tensors
    path: Path = Path("published.safetensors")

    def read(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} is read, and the header should do")

    def close(self) -> None:
        pass


def read_list(name: str) -> Tensors:
    """`name`: a path in the directory without its suffix. Lists without dtypes are read as bfloat16."""
    content = json.loads((PUBLISHED / f"{name}.json").read_text())
    return make_list({key: tuple(shape) for key, (shape, _) in content.items()}) | {
        key: TensorInfo(key, tuple(shape), getattr(torch, _DTYPES[dtype]), Path())
        for key, (shape, dtype) in content.items()
        if dtype is not None
    }


def make_list(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    return {name: TensorInfo(name, shape, torch.bfloat16, Path()) for name, shape in shapes.items()}


def repeat_layers(tensors: Tensors, counts: Mapping[str, int]) -> Tensors:
    """The whole list of which `tensors` has the first layer. `counts`: the number of layers by their name."""
    pattern = re.compile(rf"^((?:.*\.)?({'|'.join(counts)}))\.0\.")
    repeated: Tensors = {}
    for name, info in tensors.items():
        match = pattern.match(name)
        for number in range(counts[match[2]] if match else 1):
            own = name if match is None else f"{match[1]}.{number}.{name[match.end() :]}"
            repeated[own] = dataclasses.replace(info, name=own)
    return repeated


def read_index(name: str) -> set[str]:
    """The names in the index of a sharded checkpoint."""
    return set(json.loads((PUBLISHED / name).read_text())["weight_map"])


def hash_list(tensors: Iterable[TensorInfo]) -> str:
    """The hash by which DiffSynth-Studio recognizes files: over the names, alone and with their shapes, sorted."""
    keys = [key for info in tensors for key in (info.name, f"{info.name}:{'_'.join(map(str, info.shape))}")]
    return hashlib.md5(",".join(sorted(keys)).encode()).hexdigest()


def write_zeros(path: Path, tensors: Tensors) -> Path:
    """A safetensors file of zeros, which takes no space on the disk."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header, end = {}, 0
    for name, info in tensors.items():
        start, end = end, end + info.nbytes
        dtype = names[str(info.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": info.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path
