"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

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
