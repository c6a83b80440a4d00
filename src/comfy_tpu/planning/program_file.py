"""A program in a file, to be compiled on another machine."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax.export

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.json_input import parse_json
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.report import ReportGroup, ShardingReport
from comfy_tpu.parallel.workload import Matrix, Stack, Workload
from comfy_tpu.pipeline.atomic import check_place, replacing, write_errors
from comfy_tpu.planning.program import ProgramFacts, StepProgram

_FORMAT = "comfy-tpu program 3"
_HEADER, _PROGRAM = "plan.json", "program.jax-export"
_BYTES_MAX = {_HEADER: 2**24, _PROGRAM: 2**30}
"""A few kilobytes compressed may be gigabytes. The program of a 14B model's step is a few megabytes."""
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
    *(KeyError, ValueError, TypeError, AttributeError),  # of a header that is no object
    *(NotImplementedError, RuntimeError),  # of methods that the library does not know, and of passwords
)


def write_program(path: Path, program: StepProgram) -> None:
    """A zip file: what to know as JSON, and the program as `jax.export` writes it, for any other tool."""
    header = {"format": _FORMAT, **dataclasses.asdict(program.facts)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_HEADER, json.dumps(header, indent=2))
        archive.writestr(_PROGRAM, program.serialized)
    with replacing(path, field="export") as partial, write_errors(path, field="export"):
        partial.write_bytes(buffer.getvalue())


def check_export(path: Path) -> None:
    check_place(path, field="export")


def read_program(path: Path) -> StepProgram:
    if not path.is_file():
        raise InvalidValueError(
            f"from={path} is not a file; give one that `comfy-tpu plan --export` wrote", field="from"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            header = parse_json(_read_member(archive, _HEADER))
            serialized = _read_member(archive, _PROGRAM)
        found = header.pop("format")
    except _ZIP_ERRORS as error:
        raise CheckpointError(
            f"from={path} is not a program that `comfy-tpu plan --export` wrote ({error}); export it again",
            field="from",
        ) from error
    if found != _FORMAT:
        raise CheckpointError(
            f"from={path} is a {found!r}, expected {_FORMAT!r}; export it again with this version", field="from"
        )
    try:
        facts = ProgramFacts(
            **{
                **header,
                "sizes": MeshSizes(**header["sizes"]),
                "work": _workload(header["work"]),
                "weight_shapes": tuple(tuple(shape) for shape in header["weight_shapes"]),
                "square_arrays": tuple(header["square_arrays"]),
                "sharding": _sharding_report(header["sharding"]),
            }
        )
        _check_types(facts, ProgramFacts, "plan.json")
        exported = jax.export.deserialize(bytearray(serialized))
    except Exception as error:  # flatbuffers reads what it is given, and fails in its own ways
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"from={path} is damaged ({reason}); export it again", field="from") from error
    parse_slice(facts.slice_name)
    if "tpu" not in exported.platforms:
        raise CheckpointError(
            f"from={path} holds a program for {', '.join(exported.platforms)}, expected one for tpu; export it again",
            field="from",
        )
    if exported.nr_devices != facts.sizes.device_count:
        raise CheckpointError(
            f"from={path} holds a program for {exported.nr_devices} devices, but names mesh {facts.sizes}; "
            "export it again",
            field="from",
        )
    return StepProgram(facts, serialized)


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The library reads no more of a member than the size that its entry names."""
    size, most = archive.getinfo(name).file_size, _BYTES_MAX[name]
    if size > most:
        raise ValueError(f"{name} has {size} bytes, and {most} are the most")
    return archive.read(name)


def _check_types(value: Any, hint: Any, name: str) -> None:
    """Raises TypeError where a field of a dataclass, or of one in it, is not of its type."""
    kind, inside = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        for field in dataclasses.fields(value):
            _check_types(getattr(value, field.name), hints[field.name], field.name)
    elif kind is tuple and isinstance(value, tuple):
        for each in value:
            _check_types(each, inside[0], name)
    elif kind is Literal:
        if value not in inside:
            raise TypeError(f"{name} is {value!r}")
    elif kind is tuple or type(value) is not hint or (hint is int and not 0 <= value < 2**63):
        raise TypeError(f"{name} is {value!r}")


def _workload(values: dict[str, Any]) -> Workload:
    stacks = tuple(Stack(**{**stack, "matrices": _matrices(stack["matrices"])}) for stack in values["stacks"])
    return Workload(**{**values, "stacks": stacks, "outer": _matrices(values["outer"])})


def _sharding_report(values: dict[str, Any]) -> ShardingReport:
    groups = {name: ReportGroup(**values[name]) for name in ("sharded", "gathered", "replicated")}
    return ShardingReport(MeshSizes(**values["sizes"]), **groups, could_not_split=tuple(values["could_not_split"]))


def _matrices(values: list[dict[str, Any]]) -> tuple[Matrix, ...]:
    return tuple(Matrix(**{**matrix, "shape": tuple(matrix["shape"])}) for matrix in values)
