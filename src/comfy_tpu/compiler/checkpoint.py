"""Safetensors checkpoints: one file, or a directory of shards with or without an index. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from comfy_tpu.compiler.weight_names import INDEX_NAME, SHARD_NAME, choose_weights, group_weights
from comfy_tpu.errors import CheckpointError, join_names
from comfy_tpu.finite import is_finite
from comfy_tpu.json_input import read_json
from comfy_tpu.safetensors_input import SAFETENSORS_ERRORS

REMAP_BYTES = 64 * 1024**2
"""A file is mapped anew after this much of it was read. Pages of a mapping count as our memory from their first touch
until it is unmapped, so one mapping per file would end at the size of the file (measured: +256 MB for 256 MB read).
Mapping anew parses one header again, well under a millisecond per shard of a 14B model."""

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_REASON = (
    "such files are pickles, and opening a pickle runs the code inside it; use the model's safetensors version, or "
    "convert it once in a sandbox with safetensors.torch.save_file(torch.load(path, weights_only=True), ...)"
)

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The headers of a checkpoint, read when it is opened, and its tensors one at a time. For one thread at a time."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.tensors = tensors
        """In the order of the files and of the bytes in them: reading in this order reads the disk in sequence."""
        self._files: dict[Path, Any] = {}
        self._read_bytes = 0

    @classmethod
    def open(cls, path: str | Path, *, variant: str | None = None) -> Checkpoint:
        """A .safetensors file, an index, or a directory. `variant` ("fp16") chooses among several in a directory."""
        path = Path(path)
        if not path.exists():
            raise CheckpointError(
                f"checkpoint {path} does not exist; give a .safetensors file or a directory with some"
            )
        if path.is_dir():
            index, files = _find_files(path, variant)
        elif INDEX_NAME.fullmatch(path.name):
            index, files = path, []
        else:
            _check_suffix(path)
            index, files = None, [path]
        weight_map = _read_index(index) if index else {}
        if index:
            files = sorted({index.parent / shard for shard in weight_map.values()})
        tensors = _read_headers(files)
        if index:
            _check_index(index, weight_map, tensors)
        if not tensors:
            raise CheckpointError(f"checkpoint {path} holds no tensors; download it again")
        return cls(path, tensors)

    def read(self, name: str) -> torch.Tensor:
        """A tensor as a view of the mapped file: copy what must outlive the next reads or a change of the file."""
        info = self.tensors[name]
        if self._read_bytes >= REMAP_BYTES:
            self.close()
        if info.file not in self._files:
            with _read_errors(info.file):
                self._files[info.file] = safe_open(info.file, framework="pt", device="cpu")
        with _read_errors(info.file):
            tensor = self._files[info.file].get_tensor(name)
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise CheckpointError(f"{info.file} changed while it was being read ({name}); load the checkpoint again")
        if not is_finite(tensor):
            raise CheckpointError(f"{info.file}: {name} holds NaN or infinity; download it again")
        self._read_bytes += info.nbytes
        return tensor

    def close(self) -> None:
        """Unmap the files; a later read maps them again. A tensor that is still held keeps its own mapping."""
        self._files.clear()
        self._read_bytes = 0


def _find_files(directory: Path, variant: str | None) -> tuple[Path | None, list[Path]]:
    """The index of a directory, or its files where it has none."""
    groups = group_weights(path.name for path in directory.iterdir())
    if not groups:
        raise CheckpointError(_no_files_message(directory))
    chosen = choose_weights(groups, variant, str(directory))
    indexes = [directory / group.index for group in chosen if group.index]
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise CheckpointError(f"{directory} has several indexes ({names}); give the path of one of them")
    if indexes:
        return indexes[0], []
    files = [directory / name for group in chosen for name in group.files]
    _check_shard_numbers(directory, files)
    return None, files


def _no_files_message(directory: Path) -> str:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return f"{directory} has no .safetensors files, only {join_names(pickles)}: {_PICKLE_REASON}"
    return (
        f"{directory} has no .safetensors files; download them, or give the directory of one model part that has them, "
        "such as .../transformer"
    )


def _check_suffix(path: Path) -> None:
    if path.suffix in _PICKLE_SUFFIXES:
        raise CheckpointError(f"{path} is not read: {_PICKLE_REASON}")
    if path.suffix == ".gguf":
        raise CheckpointError(
            f"{path} is a GGUF file, whose quantized blocks are not read here; use the model's safetensors file, in "
            "bf16, fp16 or fp8"
        )
    if path.suffix not in (".safetensors", ".sft"):
        raise CheckpointError(f"{path} is not a .safetensors file; convert it to safetensors first")


def _check_shard_numbers(directory: Path, files: Iterable[Path]) -> None:
    for path in files:
        if match := SHARD_NAME.fullmatch(path.stem):
            count = int(match["count"])
            names = [f"{match['stem']}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
            _check_present(directory, names, "its other shards' names")


def _check_present(directory: Path, names: Iterable[str], according_to: str) -> None:
    # Not Path.is_file, which raises where an index has a name that is too long for a file.
    missing = [name for name in names if not os.path.isfile(directory / name)]  # noqa: PTH113
    if missing:
        raise CheckpointError(
            f"{directory} lacks {join_names(missing)}, which should be there according to {according_to}; "
            "download the missing files"
        )


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index)["weight_map"]
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("weight_map must map tensor names to file names")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"index {index} cannot be read ({error!r}); download it again") from error
    outside = sorted({shard for shard in weight_map.values() if Path(shard).name != shard})
    if outside:
        raise CheckpointError(
            f"index {index} names files outside its directory: {join_names(outside)}; do not trust it"
        )
    _check_present(index.parent, sorted(set(weight_map.values())), index.name)
    return weight_map


def _read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        if not file.is_file():  # the library would wait for the writer of a named pipe, deaf to signals
            raise CheckpointError(f"{file} is not a file; download it again")
        with _read_errors(file), safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.offset_keys():
                if name in tensors:
                    raise CheckpointError(
                        f"tensor {name} is in both {tensors[name].file} and {file.name}; "
                        "remove the file that does not belong, or give the path of the one to load"
                    )
                header = opened.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise CheckpointError(
                        f"{file}: {name} has dtype {dtype}, expected one of {known}; convert it first"
                    )
                tensors[name] = TensorInfo(name, tuple(header.get_shape()), getattr(torch, _DTYPES[dtype]), file)
    return tensors


def _check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    absent = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].file.name != shard]
    unlisted = [name for name in tensors if name not in weight_map]
    if absent or unlisted:
        problems = [f"not in the shard it names: {join_names(absent)}"] if absent else []
        problems += [f"in a shard but not in the index: {join_names(unlisted)}"] if unlisted else []
        raise CheckpointError(
            f"index {index} and its shards disagree ({'; '.join(problems)}); download index and shards again, together"
        )


@contextlib.contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except SAFETENSORS_ERRORS as error:
        size = file.stat().st_size if file.exists() else None
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}); it has {size} bytes and is truncated, damaged or of "
            "another format: download it again"
        ) from error
