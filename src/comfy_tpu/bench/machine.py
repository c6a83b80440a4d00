"""The machine of a run, and whether the chosen model can be measured on it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.bench.job import SMALL_MODEL, Job

if TYPE_CHECKING:
    from comfy_tpu.compiler.component import Component

PACKAGES = ("torch", "jax", "jaxlib", "torchax", "flax", "diffusers", "transformers", "triton")


def describe_machine() -> dict[str, Any]:
    """`hardware` and `versions` of a run. Starts the devices."""
    import jax
    import torch

    import comfy_tpu
    from comfy_tpu.parallel.mesh import chip_name, find_devices

    devices = find_devices()
    statistics = devices[0].memory_stats() or {}
    hardware: dict[str, Any] = {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "chip": chip_name(devices[0]),
        "devices": len(devices),
        "device_memory_bytes": statistics.get("bytes_limit"),
        "processor": _processor(),
        "processor_cores": _cores(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "driver": _nvidia_driver(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        hardware.update(device=properties.name, device_memory_bytes=properties.total_memory)
    versions: dict[str, str | None] = {"comfy-tpu": comfy_tpu.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    versions |= {"jax": jax.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    versions["cudnn"] = None if cudnn is None else str(cudnn)
    return {"hardware": hardware, "versions": versions}


def plan_run(job: Job) -> dict[str, Any]:
    """`describe_machine`, and the model, dtype, mesh and sizes of the run. Raises for choices that cannot be measured:
    an unknown model or size, a mesh that does not fit the devices or the model, weights that do not fit the memory."""
    from comfy_tpu.bench.devices import Bench, check_memory
    from comfy_tpu.bench.models import find_bench_model, first_published

    facts = describe_machine()
    accelerated = facts["hardware"]["platform"] != "cpu"
    name = (first_published() if accelerated else SMALL_MODEL) if job.model == "auto" else job.model
    dtype = ("bfloat16" if accelerated else "float32") if job.dtype == "auto" else job.dtype
    model = find_bench_model(name)
    sizes = [model.settings(size) for size in job.sizes or model.default_sizes]
    bench = Bench.open(dataclasses.replace(job, model=name, dtype=dtype))
    needed = [model.family.transformer] if {"transformer", "scaling"} & set(job.parts) else []
    if "text" in job.parts:
        needed += [encoder.component for encoder in model.family.text.encoders]
    if "end-to-end" in job.parts:
        needed = list(model.family.components)
    # The transformer in any case: its heads must be divided by the mesh.
    components = {spec: bench.component(spec, model.config(spec)) for spec in (model.family.transformer, *needed)}
    check_memory(bench, {spec.name: _weight_bytes(components[spec]) for spec in needed})
    return {
        **facts,
        "model": model.name,
        "dtype": dtype,
        "mesh": str(bench.placement.sizes) if bench.placement.sizes.device_count > 1 else "single",
        "sizes": [f"{size.width}x{size.height}x{size.num_frames}" for size in sizes],
    }


def _weight_bytes(component: Component) -> int:
    return sum(weight.size * weight.dtype.itemsize for weight in component.abstract_weights().values())


def _cores() -> int | None:
    """Those that this process may use: `taskset` and containers leave it some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else None
