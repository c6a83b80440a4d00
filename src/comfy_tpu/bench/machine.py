"""The machine that a run is measured on, for jax and for torch, and whether the model can be measured there."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from torch.utils.dlpack import from_dlpack

import comfy_tpu
from comfy_tpu.bench.job import SMALL_MODEL, Job
from comfy_tpu.bench.models import BenchModel, default_hub_id, find_bench_model
from comfy_tpu.bench.results import Emit
from comfy_tpu.bridge import alias_torch_tensor, to_device, to_host
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.config import CacheConfig, GenerationSettings, Quantization
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Config
from comfy_tpu.parallel.mesh import chip_name, find_devices, make_placement
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.running_model import DTYPES
from comfy_tpu.pipeline.vae_backend import check_vae_backend, vae_functions

PACKAGES = ("torch", "jax", "jaxlib", "torchax", "flax", "diffusers", "transformers", "triton")


def describe_machine() -> dict[str, Any]:
    """`hardware` and `versions` of a run. Starts the devices."""
    devices = find_devices()
    hardware: dict[str, Any] = {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "chip": chip_name(devices[0]),
        "devices": len(devices),
        "device_memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "processor": _find("/proc/cpuinfo", r"^model name\s*: (.+)$") or platform.machine(),
        # Those that this process may use: `taskset` and containers leave it some.
        "processor_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "driver": _find("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
    }
    cudnn = None
    if torch.cuda.is_available():
        properties, cudnn = torch.cuda.get_device_properties(0), torch.backends.cudnn.version()
        hardware.update(device=properties.name, device_memory_bytes=properties.total_memory)
    versions: dict[str, str | None] = {"comfy-tpu": comfy_tpu.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    versions |= {"jax": jax.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    versions["cudnn"] = None if cudnn is None else str(cudnn)
    return {"hardware": hardware, "versions": versions}


def plan_run(request: Job) -> dict[str, Any]:
    """Fields of the `Run`, and its sizes. Raises for what cannot be measured: an unknown model or size, a mesh that
    does not fit the devices or the model, weights that do not fit the memory."""
    facts = describe_machine()
    accelerated = facts["hardware"]["platform"] != "cpu"
    name = (default_hub_id() if accelerated else SMALL_MODEL) if request.model == "auto" else request.model
    dtype = ("bfloat16" if accelerated else "float32") if request.dtype == "auto" else request.dtype
    model = find_bench_model(name)
    check_vae_backend(request.vae_backend, model.family, lambda: model.config(model.family.vae.component))
    sizes = [model.settings(size) for size in request.sizes or model.default_sizes]
    bench = Bench.open(dataclasses.replace(request, model=name, dtype=dtype))
    needed = [model.family.transformer] if {"transformer", "scaling"} & set(request.parts) else []
    if "text" in request.parts:
        needed += [encoder.component for encoder in model.family.text.encoders]
    if "end-to-end" in request.parts:
        needed = list(model.family.components)
    # The transformer in any case: its heads must be divided by the mesh.
    components = {spec: bench.component(spec, model.config(spec)) for spec in (model.family.transformer, *needed)}
    weights = {spec.name: components[spec].abstract_weights().values() for spec in needed}
    check_memory(bench, {name: sum(each.size * each.dtype.itemsize for each in weights[name]) for name in weights})
    mesh = bench.mesh_facts.get("mesh", "single")
    return {
        "run": {**facts, "model": model.name, "dtype": dtype, "mesh": mesh},
        "sizes": [f"{size.width}x{size.height}x{size.num_frames}" for size in sizes],
    }


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a part runs, the model that runs there, and where its rows go."""

    job: Job
    emit: Emit
    model: BenchModel
    placement: Placement
    device: torch.device
    """torch's name of the first device; on a TPU the host, where peers are refused."""
    dtype: torch.dtype
    cache: CacheConfig

    @classmethod
    def open(cls, job: Job, emit: Emit = lambda message: None) -> Bench:
        model = find_bench_model(job.model)
        size = job.size or (job.sizes or model.default_sizes)[0]
        placement = make_placement(job.mesh, workload=lambda: model.workload(model.settings(size)))
        device = torch.device("cuda" if placement.platform == "gpu" else "cpu")
        cache = CacheConfig(directory=Path(job.cache_directory))
        return cls(job, emit, model, placement, device, DTYPES[job.dtype], cache)

    @property
    def torch_refusal(self) -> str | None:
        """Why torch's peers cannot run on this device; None where they can."""
        if self.placement.platform == "tpu":
            return "diffusers has no TPU backend; the peers are measured on NVIDIA GPUs and CPUs"
        if self.device.type == "cuda" and not torch.cuda.is_available():
            return "jax sees a GPU that torch does not; install a torch with CUDA"
        return None

    @property
    def default_attention(self) -> str:
        """On a GPU the fastest backend of torch there: torch would take another one by itself."""
        return "CUDNN_ATTENTION" if self.device.type == "cuda" else ""

    @property
    def mesh_facts(self) -> dict[str, Any]:
        """Empty on one device."""
        sizes = self.placement.sizes
        return {"mesh": str(sizes)} if sizes.device_count > 1 else {}

    def component(self, spec: ComponentSpec, config: Config, quantize: Quantization = "none") -> Any:
        """A `Component`, or what stands for it in another backend of the VAE."""
        family = self.model.family
        if spec is family.vae.component:
            make: Callable[..., Any] | None = vae_functions(self.job.vae_backend, family).make_component
            if make is not None:
                return make(config, self.placement, dtype=self.dtype, cache=self.cache)
        return Component(spec, config, self.placement, dtype=self.dtype, cache=self.cache, quantize=quantize)

    def forward_settings(self, size: str) -> GenerationSettings:
        """Of a forward of one video for each part of the mesh that divides the batch."""
        return self.model.forward_settings(size, self.placement.sizes.dp)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator).to(dtype or self.dtype)

    def array(self, tensor: torch.Tensor) -> Any:
        """The tensor as an array of jax on the same devices, without a copy where that is possible."""
        if tensor.device.type == "cpu" or self.placement.sizes.device_count > 1:
            return to_device(tensor.cpu(), self.placement.sharding())
        self.synchronize()
        return alias_torch_tensor(tensor, self.placement.sharding())

    def tensor(self, array: jax.Array) -> torch.Tensor:
        """The array as a tensor of torch on its device."""
        if len(array.sharding.device_set) > 1:
            return to_host(array).to(self.device)
        return from_dlpack(array.block_until_ready())


def check_memory(bench: Bench, sizes: Mapping[str, int]) -> None:
    """Raises InvalidValueError where weights, once for torch and once for us, do not fit. `sizes`: bytes by name."""
    share = bench.placement.sizes.sp * bench.placement.sizes.tp if bench.placement.platform != "cpu" else 1
    needed = sum(size + size // share for size in sizes.values())
    free = _free_bytes(bench)
    if free is not None and needed > free:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InvalidValueError(
            f"model={bench.model.name} needs {needed / 2**30:.3g} GiB for the weights of its {', '.join(sizes)}, once "
            f"for diffusers and once for comfy-tpu ({largest}: {sizes[largest] / 2**30:.3g} GiB each), and "
            f"{free / 2**30:.3g} GiB are free here; choose a smaller model, such as --model small, fewer parts, or a "
            "machine with more memory",
            field="model",
        )


def _free_bytes(bench: Bench) -> int | None:
    if bench.placement.platform != "cpu":
        limit = (bench.placement.mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
        return torch.cuda.mem_get_info()[0] if bench.device.type == "cuda" and torch.cuda.is_available() else limit
    available = _find("/proc/meminfo", r"^MemAvailable:\s+(\d+)")
    return int(available) * 1024 if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _find(path: str, pattern: str) -> str | None:
    """The group of the pattern in a text file; None where the file is not there or has no such line."""
    with contextlib.suppress(OSError):
        if found := re.search(pattern, Path(path).read_text(), re.MULTILINE):
            return found[1].strip()
    return None


def free_device_memory() -> None:
    """torch keeps the memory it once had, and XLA cannot ask for it. A host's is not short, and collecting is slow."""
    if jax.default_backend() != "cpu":
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def disable_tf32() -> Iterator[None]:
    """A float32 reference in float32: torch lets cuDNN convolve it in TF32 otherwise."""
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
