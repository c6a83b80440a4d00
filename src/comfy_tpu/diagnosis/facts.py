"""Gathers facts about this machine. Nothing here evaluates them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import comfy_tpu
from comfy_tpu.parallel.tpu_holders import TpuHolder, find_holders, find_tpu

# A single TPU host starts in about 10 s. One host of a pod waits for the others without end.
DEVICE_TIMEOUT_S = 120.0
IMPORT_TIMEOUT_S = 120.0
MODEL_TIMEOUT_S = 300.0

# Reported beside the required packages: they decide whether the required ones work.
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
COMPANIONS = ("jaxlib", "libtpu", *CUDA_PLUGINS, "torchvision", "torchaudio")
# Not required, but transformers imports them wherever they are installed.
TORCH_EXTENSIONS = ("torchvision", "torchaudio")


@dataclasses.dataclass(frozen=True)
class Python:
    version: str
    executable: str
    required: str


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    kind: str
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that JAX found, or the reason why it did not start."""

    platform: str | None
    devices: tuple[Device, ...] = ()
    requested: str | None = None
    """JAX_PLATFORMS, which keeps JAX from looking further."""
    messages: tuple[str, ...] = ()
    """What JAX logged about back ends that it passed over."""
    error: str | None = None
    tracing: str | None = None
    """Why torch code cannot be traced with these versions; None where it can."""
    demo_models: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Why each demo model cannot be opened, None where it can; empty where that could not be tried."""
    holders: tuple[TpuHolder, ...] = ()
    """Where JAX did not get a TPU: the processes that hold it."""


@dataclasses.dataclass(frozen=True)
class TorchExtension:
    """A package that is built for one torch: its version, and whether it imports beside the installed torch."""

    version: str | None
    error: str | None = None
    """Why the two do not import together; None where they do."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Accelerators that the operating system shows, whether or not JAX can use them."""

    tpu: str | None = None
    """The device file of a TPU, such as "/dev/accel0"."""
    tpu_variable: str | None = None
    """An environment variable that only a TPU machine sets."""
    nvidia: str | None = None
    nvidia_driver: int | None = None
    """The driver's major version."""


@dataclasses.dataclass(frozen=True)
class ModelComponent:
    name: str
    bytes_on_disk: int | None
    """Of its weights; None where the model is not on this machine."""
    sharding: Mapping[str, Any] | None
    """As `ShardingReport.as_dict` has it; None where the devices did not start."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model on the devices of this machine, without its weights."""

    name: str
    family: str | None
    directory: str | None
    error: str | None
    """Why it was not recognised."""
    incomplete: str | None
    """What its files lack."""
    size: str | None
    """Width x height x frames of its default request."""
    mesh: str | None
    components: tuple[ModelComponent, ...] = ()
    needed_bytes: int | None = None
    """Of one device: on a TPU for a step at that size, elsewhere for the weights of the largest component."""
    usable_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class HostMemory:
    total_bytes: int
    available_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Directory:
    path: str
    exists: bool
    writable: bool
    """For a directory that does not exist: whether it can be made."""
    entries: int
    size_bytes: int
    free_bytes: int


def python() -> Python:
    version = ".".join(map(str, sys.version_info[:3]))
    return Python(version, sys.executable, _read_project()[1])


def requirements() -> tuple[str, ...]:
    """The requirements of the package, without its extras, as in pyproject.toml."""
    return _read_project()[0]


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed versions by distribution name; None where there is none. Imports nothing."""
    return {name: _version(name) for name in names}


def devices(timeout_s: float = DEVICE_TIMEOUT_S) -> Devices:
    """Starts JAX in a subprocess, where it can crash, hang, or hold the accelerator without harm."""
    environment = _environment()
    requested = environment.get("JAX_PLATFORMS") or None
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or the probe takes 75% of a GPU that is in use
    command = [sys.executable, "-P", "-m", "comfy_tpu.diagnosis.device_probe"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        error = f"JAX was still starting after {timeout_s:.0f} s"
        return Devices(None, requested=requested, error=error, holders=find_holders())
    if done.returncode != 0 or not done.stdout.strip():
        said = done.stderr.strip().splitlines()
        error = f"JAX {_describe_exit(done.returncode)} while starting: {said[-1] if said else 'it said nothing'}"
        return Devices(None, requested=requested, error=error, holders=find_holders(message=error))
    answer = json.loads(done.stdout.splitlines()[-1])
    message = " ".join((*answer["messages"], answer["error"] or ""))
    return Devices(
        platform=answer["platform"],
        devices=tuple(Device(**device) for device in answer["devices"]),
        requested=requested,
        messages=tuple(answer["messages"]),
        error=answer["error"],
        tracing=answer["tracing"],
        demo_models=answer["demo_models"],
        holders=() if answer["platform"] == "tpu" else find_holders(message=message),
    )


def model(name: str, found: Devices, memory: HostMemory | None, *, ignored_keys: Sequence[str] = ()) -> ModelFacts:
    """In a process of its own, which starts the CPU only: libraries may fail in any way while a model is built."""
    count = len(found.devices)
    memory_bytes = found.devices[0].memory_bytes if count else None
    if memory_bytes is None and memory is not None and count:
        memory_bytes = memory.total_bytes // count  # virtual devices share the machine's memory
    asked = {
        "model": name,
        "platform": found.platform,
        "kind": found.devices[0].kind if count else "",
        "device_count": count,
        "memory_bytes": memory_bytes,
        "ignored_keys": list(ignored_keys),
    }
    command = [sys.executable, "-P", "-m", "comfy_tpu.diagnosis.model_probe"]
    done = subprocess.run(
        command,
        env={**_environment(), "JAX_PLATFORMS": "cpu"},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=MODEL_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip():
        said = done.stderr.strip().splitlines()
        ending = said[-1] if said else "it said nothing"
        error = f"the process that looked at it {_describe_exit(done.returncode)}: {ending}"
        return ModelFacts(name, None, None, error, None, None, None)
    return parse_model(json.loads(done.stdout.splitlines()[-1]))


def parse_model(answer: Mapping[str, Any]) -> ModelFacts:
    """From what the probe prints."""
    components = tuple(ModelComponent(**component) for component in answer["components"])
    return ModelFacts(**{**answer, "components": components})


def _environment() -> dict[str, str]:
    """Of a process that imports this package."""
    environment = dict(os.environ)
    source = str(Path(comfy_tpu.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), source]))
    return environment


def torch_extensions() -> dict[str, TorchExtension]:
    found = versions(TORCH_EXTENSIONS)
    installed = [name for name in TORCH_EXTENSIONS if found[name]]
    errors: dict[str, str | None] = {}
    if installed and import_error(("torch", *installed)) is not None:  # then which one it is
        errors = {name: import_error(("torch", name)) for name in installed}
    return {name: TorchExtension(found[name], errors.get(name)) for name in TORCH_EXTENSIONS}


def import_error(names: Iterable[str]) -> str | None:
    """Why the packages cannot be imported together, tried in a subprocess: a broken torch can crash it."""
    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing was not done after {IMPORT_TIMEOUT_S:.0f} s"
    said = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (said[-1] if said else f"exit status {done.returncode}")


def hardware(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Hardware:
    driver_file = root / "proc/driver/nvidia/version"
    driver = re.search(r"Kernel Module.*?\s(\d+)\.\d", driver_file.read_text()) if driver_file.exists() else None
    return Hardware(
        tpu=find_tpu(root),
        tpu_variable=_tpu_variable(environ),
        nvidia=_nvidia_device(root),
        nvidia_driver=int(driver[1]) if driver else None,
    )


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> HostMemory:
    if not meminfo.exists():
        return HostMemory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None)
    kibibytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE))
    return HostMemory(int(kibibytes["MemTotal"]) * 1024, int(kibibytes["MemAvailable"]) * 1024)


def directory(path: Path, entry_pattern: str) -> Directory:
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return Directory(
        path=str(path),
        exists=path.is_dir(),
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        entries=sum(1 for _ in path.glob(entry_pattern)) if path.is_dir() else 0,
        size_bytes=sum(file.lstat().st_size for file in files),
        free_bytes=shutil.disk_usage(nearest).free,
    )


def model_cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps downloads, by its documented variables."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _read_project() -> tuple[tuple[str, ...], str]:
    """Requirements and Python versions, from the installed package or, in a plain checkout, from its pyproject.toml."""
    try:
        metadata = importlib.metadata.metadata("comfy-tpu")
    except importlib.metadata.PackageNotFoundError:
        import tomllib  # not in Python 3.10, which must live long enough to be told that it is too old

        file = Path(comfy_tpu.__file__).parents[2] / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        return tuple(project["dependencies"]), project["requires-python"]
    lines = metadata.get_all("Requires-Dist") or []
    return tuple(line for line in lines if "extra ==" not in line), metadata["Requires-Python"]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_exit(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"


def _tpu_variable(environ: Mapping[str, str]) -> str | None:
    if environ.get("TPU_SKIP_MDS_QUERY"):  # set to compile for a TPU where there is none
        return None
    names = ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")
    return next((name for name in names if environ.get(name)), None)


def _nvidia_device(root: Path) -> str | None:
    for device in sorted((root / "dev").glob("nvidia[0-9]*")):
        return f"/dev/{device.name}"
    if (root / "dev/dxg").exists() and shutil.which("nvidia-smi"):
        return "/dev/dxg"
    return None
