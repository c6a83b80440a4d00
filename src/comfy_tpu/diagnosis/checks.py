"""Turns facts into findings, each with a command that fixes the problem. Nothing here inspects the machine."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from comfy_tpu.diagnosis import repairs
from comfy_tpu.diagnosis.facts import (
    CUDA_PLUGINS,
    Devices,
    Directory,
    Hardware,
    HostMemory,
    ModelFacts,
    Python,
    TorchExtension,
)
from comfy_tpu.diagnosis.tested_versions import describe_newer
from comfy_tpu.distribution import restore_command
from comfy_tpu.parallel.report import format_gb, summarize

Status = Literal["ok", "warning", "blocked"]
"""blocked: a run cannot start, or would land on the CPU of a machine that has a TPU."""

# CUDA 13 needs this driver; CUDA 12 runs on older and newer ones.
CUDA13_DRIVER = 580
LOW_DISK_BYTES = 1 << 30
_VARIABLE = re.compile(r"\b(?:JAX_[A-Z0-9_]+|XLA_FLAGS|LIBTPU_INIT_ARGS)\b")


@dataclasses.dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    detail: str
    fix: str | None = None


def check_python(python: Python, tested: Sequence[str] = ()) -> Finding:
    """`tested`: versions in ascending order."""
    detail = f"{python.version} ({python.executable}){describe_newer(_minor(python.version), [*map(_minor, tested)])}"
    if SpecifierSet(python.required).contains(python.version, prereleases=True):
        return Finding("python", "ok", detail)
    fix = "let uv bring a newer one, and install comfy-tpu there: uv venv --seed --python 3.12"
    return Finding("python", "blocked", f"{detail}; needs {python.required}", fix)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_package(requirement: Requirement, versions: Mapping[str, str | None], tested: Sequence[str] = ()) -> Finding:
    """`tested`: versions in ascending order."""
    version = versions[requirement.name]
    needs = f"needs {requirement.specifier}" if requirement.specifier else "needs any version"
    # Named beside a newer torch, torchvision moves along; otherwise pip would leave it with the older one's.
    companions = ["torchvision"] if requirement.name == "torch" and versions.get("torchvision") else []
    fix = repairs.install(f"{requirement.name}{requirement.specifier}", *companions)
    if version is None:
        return Finding(requirement.name, "blocked", f"not installed; {needs}", fix)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, "blocked", f"{version} is too old; {needs}", fix)
    return Finding(requirement.name, "ok", version + describe_newer(version, tested))


def check_devices(devices: Devices, versions: Mapping[str, str | None]) -> Finding:
    if holder := _tpu_holder(devices):
        return holder
    if devices.error is None:
        return Finding("devices", "ok", _describe(devices))
    if devices.requested and "Unable to initialize backend" in devices.error:
        fix = "unset JAX_PLATFORMS"
    elif "still starting" in devices.error:
        fix = "on one host of a TPU pod, run the command on all of its hosts at once"
    elif named := _VARIABLE.search(devices.error):  # its value is refused
        fix = f"unset {named[0]}"
    else:
        version = versions.get("jax")
        fix = repairs.reinstall(["jax", "jaxlib"], f"jax=={version}" if version else "jax")
    return Finding("devices", "blocked", devices.error, fix)


def check_tracing(devices: Devices, versions: Mapping[str, str | None]) -> Finding | None:
    if devices.error is not None:
        return None  # nothing was tried
    together = ", ".join(f"{name} {versions.get(name)}" for name in ("torchax", "torch", "jax"))
    if devices.tracing is None:
        return Finding("tracing", "ok", f"{together} work together")
    fix = repairs.repair_tracing(versions)
    return Finding("tracing", "blocked", f"{together} do not work together: {devices.tracing}", fix)


def check_torch_extension(
    name: str, extensions: Mapping[str, TorchExtension], versions: Mapping[str, str | None]
) -> Finding | None:
    torch, found = versions.get("torch"), extensions[name]
    if found.version is None or torch is None:
        return None  # it is not required; a missing torch has its own finding
    together = f"torch {torch} and {name} {found.version}"
    if found.error is None:
        return Finding(name, "ok", f"{together} work together")
    detail = f"{together} do not import together: {found.error}"
    if index := repairs.torch_index(torch):
        detail += f" ({name} for this build of torch: {index})"
    *_, last = (each for each, extension in extensions.items() if extension.error)
    # One command for all: torchaudio's takes a torchvision along.
    return Finding(name, "blocked", detail, repairs.replace_torch_extension(last, torch))


def check_demo_models(devices: Devices, extensions: Mapping[str, TorchExtension]) -> Finding | None:
    if not devices.demo_models or any(extension.error for extension in extensions.values()):
        return None  # nothing was tried, or it cannot work before what has a finding of its own does
    errors = [error.partition(";")[0] for error in devices.demo_models.values() if error is not None]
    if not errors:
        return Finding("demo models", "ok", ", ".join(devices.demo_models))
    return Finding("demo models", "blocked", "; ".join(errors), restore_command("src/comfy_tpu/assets"))


def check_tpu(hardware: Hardware, devices: Devices, versions: Mapping[str, str | None]) -> Finding | None:
    if devices.platform is None or devices.platform == "tpu" or _tpu_holder(devices):
        return None  # works, or check_devices has said what is wrong
    if hardware.tpu is None:
        if hardware.tpu_variable is None:
            return None
        detail = f"{hardware.tpu_variable} is set but this system shows no TPU; JAX uses the {devices.platform}"
        return Finding("tpu", "warning", detail, "give the container the device: docker run --privileged --net=host")
    if devices.requested:
        detail = f"there is a TPU ({hardware.tpu}) but JAX_PLATFORMS={devices.requested} hides it"
        return Finding("tpu", "warning", detail, "unset JAX_PLATFORMS")
    passed_over = next((message for message in devices.messages if "'tpu'" in message), None)
    because = f": {passed_over}" if passed_over else ""
    detail = f"there is a TPU ({hardware.tpu}) but JAX sees only the {devices.platform}{because}"
    return Finding("tpu", "blocked", detail, _plugin_fix("jax[tpu]", ["libtpu"], versions))


def check_nvidia(hardware: Hardware, devices: Devices, versions: Mapping[str, str | None]) -> Finding | None:
    if hardware.nvidia is None or devices.platform != "cpu":
        return None
    if devices.requested:
        detail = f"there is an NVIDIA GPU ({hardware.nvidia}) but JAX_PLATFORMS={devices.requested} hides it"
        return Finding("gpu", "warning", detail, "unset JAX_PLATFORMS")
    driver = f", driver {hardware.nvidia_driver}" if hardware.nvidia_driver else ""
    passed_over = next((message for message in devices.messages if "'cuda'" in message), None)
    because = f": {passed_over}" if passed_over else ""
    detail = f"there is an NVIDIA GPU ({hardware.nvidia}{driver}) but JAX sees only the cpu{because}"
    cuda = "cuda13" if (hardware.nvidia_driver or 0) >= CUDA13_DRIVER else "cuda12"
    return Finding("gpu", "warning", detail, _plugin_fix(f"jax[{cuda}]", CUDA_PLUGINS, versions))


def check_memory(memory: HostMemory) -> Finding:
    total = format_bytes(memory.total_bytes)
    if memory.available_bytes is None:
        return Finding("host memory", "ok", total)
    return Finding("host memory", "ok", f"{format_bytes(memory.available_bytes)} free of {total}")


def check_compile_cache(cache: Directory) -> Finding:
    fix = "export JAX_COMPILATION_CACHE_DIR=/a/writable/directory"
    if not cache.writable:
        detail = f"{cache.path} cannot be written: every process compiles anew what it lacks"
        return Finding("compile cache", "warning", detail, fix)
    state = f"{cache.entries} programs, {format_bytes(cache.size_bytes)}" if cache.exists else "not made yet"
    detail = f"{cache.path} ({state}; {format_bytes(cache.free_bytes)} free on the disk)"
    if cache.free_bytes < LOW_DISK_BYTES:
        return Finding("compile cache", "warning", detail, fix)
    return Finding("compile cache", "ok", detail)


def check_model_cache(cache: Directory) -> Finding:
    state = f"{cache.entries} models, {format_bytes(cache.size_bytes)}" if cache.exists else "not made yet"
    detail = f"{cache.path} ({state}; {format_bytes(cache.free_bytes)} free on the disk)"
    if not cache.writable:
        return Finding("model cache", "warning", f"{detail}; cannot be written", "export HF_HOME=/a/writable/directory")
    return Finding("model cache", "ok", detail)


def check_model(model: ModelFacts) -> list[Finding]:
    """Its family, its files, its memory, and how its weights would be split."""
    if model.error is not None or model.family is None:
        fix = "give a directory in diffusers' layout, the hub id of a published model, or demo"
        return [Finding("model", "blocked", model.error or f"{model.name} was not recognised", fix)]
    findings = [Finding("model", "ok", f"{model.name} is {model.family}"), _check_model_files(model)]
    if model.needed_bytes is not None and model.mesh is not None:
        findings.append(_check_model_memory(model, model.needed_bytes, model.mesh))
    findings += [
        Finding(component.name, "ok", summarize(component.sharding).replace("\n", "; "))
        for component in model.components
        if component.sharding is not None
    ]
    return findings


def _check_model_files(model: ModelFacts) -> Finding:
    if model.directory is None:
        fix = f"download it with its first run: comfy-tpu generate PROMPT --model {model.name}"
        return Finding("model files", "warning", "not on this machine", fix)
    if model.incomplete is not None:
        return Finding("model files", "blocked", " ".join(model.incomplete.split()), "download the model again")
    sizes = [(component.name, component.bytes_on_disk or 0) for component in model.components]
    total = format_gb(sum(size for _, size in sizes))
    parts = ", ".join(f"{name} {format_gb(size)}" for name, size in sizes)
    return Finding("model files", "ok", f"complete in {model.directory}: {parts}; {total} in all")


def _check_model_memory(model: ModelFacts, needed: int, mesh: str) -> Finding:
    what = f"{format_gb(needed)} of a device at {model.size} on mesh {mesh}"
    if model.usable_bytes is None:
        return Finding("model memory", "ok", f"{what}; these devices do not say how much they have")
    what += f", {format_gb(model.usable_bytes)} usable"
    if needed <= model.usable_bytes:
        return Finding("model memory", "ok", what)
    fix = f"choose a smaller size, or more chips: comfy-tpu plan {model.name} --tpu v6e-8"
    return Finding("model memory", "blocked", f"it does not fit: {what}", fix)


def format_bytes(count: int) -> str:
    if count < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.1f} GiB"


def _plugin_fix(requirement: str, plugins: Sequence[str], versions: Mapping[str, str | None]) -> str:
    """Reinstalls a plugin that is installed and does not work, since pip would find nothing to do; else installs it."""
    installed = [name for name in plugins if versions.get(name)]
    return repairs.reinstall(installed, requirement) if installed else repairs.install(requirement)


def _describe(devices: Devices) -> str:
    groups = Counter((device.kind, device.memory_bytes) for device in devices.devices)
    described = []
    for (kind, memory), count in groups.items():
        each = f", {format_bytes(memory)} each" if memory is not None else ""
        described.append(f"{count} x {kind}{each}")
    return f"{devices.platform}: {'; '.join(described)}"


def _tpu_holder(devices: Devices) -> Finding | None:
    if devices.holders and (devices.requested is None or "tpu" in devices.requested.split(",")):
        pids = " ".join(str(holder.pid) for holder in devices.holders)
        held = " and ".join(map(str, devices.holders))
        return Finding("devices", "blocked", f"the TPU is held by {held}", f"end that process: kill {pids}")
    for message in (*devices.messages, devices.error or ""):
        if match := re.search(r"already in use by (?:a )?process with pid (\d+)", message):
            pid = match[1]
            return Finding("devices", "blocked", f"the TPU is held by process {pid}", f"end that process: kill {pid}")
        if re.search(r"libtpu_lockfile|libtpu\.so.* already in use|TPU is already in use", message):
            fix = "end the other process, or if there is none: rm /tmp/libtpu_lockfile"
            return Finding("devices", "blocked", "the TPU is held by another process", fix)
    return None
