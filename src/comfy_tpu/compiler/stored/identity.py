"""What decides a traced program, as data: values, functions, installed software, devices, settings of JAX.

A stored program is found by a hash of all of it, so that one that anything else would have made is never found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import time
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from comfy_tpu.bridge.operators import OPERATORS
from comfy_tpu.json_input import parse_json

_PACKAGE = Path(__file__).resolve().parents[2]
_VERSIONED = ("diffusers", "flax", "jax", "jaxlib", "numpy", "tokamax", "torch", "torchax", "transformers")
"""Packages that are known by their version, unless they are installed from a checkout."""
_COMPILERS = (
    "absl-py",  # Pallas for Hopper needs it, and another kernel is chosen without it
    "libtpu",
    *(f"jax-cuda{number}-{part}" for number in (12, 13) for part in ("plugin", "pjrt")),
    *(f"nvidia-{library}{suffix}" for library in ("cudnn", "cublas") for suffix in ("", "-cu12", "-cu13")),
)
"""Other distributions whose version decides what a program is compiled to."""
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_IRRELEVANT_SETTINGS = re.compile("cache|log|traceback|profil|dump|platforms|coordinat|cluster|explain|softcheck")
"""Settings of JAX that do not change programs; all others are part of the identity."""
_DEPTH_MAX = 24


class NotDescribableError(Exception):
    """A value that cannot be described, so that nothing can be stored that depends on it."""


def digest(*parts: Any) -> str:
    """A hash of data that `describe` returned."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def describe(value: Any, depth: int = 0) -> Any:
    """The value as JSON data: equal for equal values in any process, different for different ones.

    Functions are described by their names, what they close over, and the source of the package that they are from.
    """
    if depth > _DEPTH_MAX:
        raise NotDescribableError("a value that is nested too deeply, or contains itself")
    inner = functools.partial(describe, depth=depth + 1)
    if value is None or isinstance(value, (bool, int, str)):
        return value if type(value) in (type(None), bool, int, str) else [type(value).__qualname__, str(value)]
    if isinstance(value, float):
        return ["float", repr(value)]  # 2 and 2.0 are different programs
    if isinstance(value, Mapping):
        return {"mapping": sorted(([inner(name), inner(each)] for name, each in value.items()), key=json.dumps)}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(inner, value), key=json.dumps)}
    if isinstance(value, (PartitionSpec, torch.dtype, np.dtype, torch.device, enum.Enum, Path)):
        return [type(value).__name__, str(value)]
    if isinstance(value, (list, tuple)):
        return [type(value).__qualname__, *map(inner, value)]
    if isinstance(value, functools.partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: inner(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [_named(type(value)), fields]
    if isinstance(value, types.MethodType):
        return ["method", inner(value.__self__), inner(value.__func__)]
    if isinstance(value, types.FunctionType):
        return _function(value, inner)
    if isinstance(value, type):
        return _named(value)
    wrapped = getattr(value, "__wrapped__", None)  # functools.lru_cache
    if isinstance(wrapped, types.FunctionType):
        return inner(wrapped)
    raise NotDescribableError(f"a {type(value).__qualname__}")


def _function(function: types.FunctionType, inner: Any) -> Any:
    code = function.__code__
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise NotDescribableError(f"{function.__qualname__}, which closes over a name without a value") from None
    return {
        "function": [*_named(function), code.co_firstlineno, hashlib.sha256(_code_bytes(code)).hexdigest()[:16]],
        "closure": [inner(cell) for cell in cells],
        "defaults": [inner(function.__defaults__), inner(function.__kwdefaults__)],
    }


def _code_bytes(code: types.CodeType) -> bytes:
    """The code of a function, for two that are on one line."""
    inside = [_code_bytes(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    plain = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
    return b"".join((code.co_code, repr((code.co_names, plain)).encode(), *inside))


def _named(value: Any) -> list[str]:
    """The full name of a class or function, with a hash of the source that it is from."""
    return [value.__module__, value.__qualname__, _package_source(value.__module__.partition(".")[0])]


@functools.cache
def _package_source(name: str) -> str:
    if name == "builtins" or name in sys.stdlib_module_names:
        return f"python {platform.python_version()}"
    if name in _VERSIONED and not _is_checkout(name):
        return f"{name} {_version(name)}"
    if name == "__main__":
        main = getattr(sys.modules["__main__"], "__file__", None)
        if main is None:
            raise NotDescribableError("a function that is in no file")
        return _hash_files([Path(main)], Path(main).parent)
    root = _find_package(name)
    if root is None:
        raise NotDescribableError(f"a function of {name}, whose source is not found")
    return _hash_files([root], root.parent) if root.is_file() else hash_sources(root)


def _find_package(name: str) -> Path | None:
    """The directory of a top-level package, or the file of a module, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


def hash_sources(directory: Path) -> str:
    """A hash of the source and the tables of a package; its large assets are none."""
    return _hash_files(_list_sources(directory), directory)


def _list_sources(directory: Path) -> list[Path]:
    found = (path for suffix in ("*.py", "*.json") for path in directory.rglob(suffix))
    return sorted(path for path in found if "assets" not in path.relative_to(directory).parts)


def _hash_files(files: Iterable[Path], directory: Path) -> str:
    found = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(directory).as_posix()}:{len(content)};".encode())
        found.update(content)
    return found.hexdigest()[:24]


def hash_module_sources(modules: Iterable[str]) -> dict[str, str]:
    """A hash of the source of each module by its full name: its file, or its whole package where the package's version
    does not tell what else is in it. Nothing is imported; "" where there is no file."""
    return {name: _hash_module(name) for name in sorted(set(modules))}


def _hash_module(name: str) -> str:
    top, *inside = name.split(".")
    root = _find_package(top)
    if root is None:
        return ""
    if top not in _VERSIONED and root.is_dir():
        return hash_sources(root)
    path = root if root.is_file() else root.joinpath(*inside)
    for candidate in (path, path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if candidate.is_file():
            return _hash_files([candidate], candidate.parent)
    return ""


_BEGIN = time.time()


def is_changed_since_start() -> bool:
    """Whether something that is traced was installed or edited after this process had begun to import it: what it
    traces is then not what its source says."""
    homes = [root / "__init__.py" for name in _VERSIONED if (root := _find_package(name)) is not None]
    for path in (*_list_sources(_PACKAGE), *homes):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > _BEGIN:
                return True
    return False


@functools.cache
def software() -> Mapping[str, str]:
    """What is installed that takes part in tracing and compiling: versions, and our own source."""
    found = {name: _package_source(name) for name in _VERSIONED if _version(name)}
    found |= {name: version for name in _COMPILERS if (version := _version(name))}
    return {"comfy_tpu": hash_sources(_PACKAGE), **found}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_checkout(name: str) -> bool:
    """Whether a package is installed from a directory or a repository, so that its version does not say what it is."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    origin = distribution.read_text("direct_url.json")
    found = parse_json(origin) if origin else {}
    is_elsewhere = Path(str(distribution.locate_file(name))).resolve() != (_find_package(name) or _PACKAGE).resolve()
    return "dir_info" in found or "vcs_info" in found or is_elsewhere


def environment() -> dict[str, Any]:
    """Settings of this process that change programs."""
    names = [name for name in jax.config.values if not _IRRELEVANT_SETTINGS.search(name)]
    return {
        "jax": {name: repr(getattr(jax.config, name, jax.config.values[name])) for name in sorted(names)},
        "variables": {name: os.environ.get(name, "").split() for name in _VARIABLES},
        "operators": _foreign_operators(),
    }


def _foreign_operators() -> list[Any]:
    """Operators that other packages have added to the table."""
    added = [entry for entry in OPERATORS.values() if not entry.function.__module__.startswith("comfy_tpu.")]
    return sorted(([str(each.target), describe(each.function)] for each in added), key=json.dumps)


def describe_mesh(mesh: Any) -> Any:
    """The devices of a mesh: kind, order, place, and the driver that runs them."""
    if not isinstance(mesh, Mesh):
        raise NotDescribableError("a mesh of devices that are not attached")
    devices = list(mesh.devices.flat)
    return {
        "axes": [[name, size] for name, size in mesh.shape.items()],
        "devices": [[device.id, device.device_kind, repr(getattr(device, "coords", None))] for device in devices],
        "driver": [devices[0].platform, devices[0].client.platform_version, _host(devices[0].platform)],
        "processes": jax.process_count(),
    }


@functools.cache
def _host(platform_name: str) -> str:
    """What the programs of a platform depend on that JAX does not tell: a CPU's instructions, a GPU's driver."""
    if platform_name == "cpu":
        lines = _read("/proc/cpuinfo").splitlines()
        known = {line for line in lines if line.partition(":")[0].strip() in ("flags", "Features", "model name")}
        return digest(platform.machine(), sorted(known) or platform.processor())
    return _read("/proc/driver/nvidia/version") if platform_name == "gpu" else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def describe_sharding(sharding: Any, mesh: Any) -> Any:
    """A sharding over the program's own mesh, which is described once. A stored program does not check where its
    arguments are, so that JAX compiles, and refuses, those on another mesh."""
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return [str(sharding.spec), sharding.memory_kind]
    raise NotDescribableError(f"a {type(sharding).__name__} over other devices")
