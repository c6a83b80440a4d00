"""The devices of a part, for jax and for torch, and arrays that both see, without a copy where that is possible."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from torch.utils.dlpack import from_dlpack

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.models import BenchModel, find_bench_model
from comfy_tpu.bridge import to_device, to_host
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.weights import alias_torch_tensor
from comfy_tpu.config import CacheConfig, GenerationSettings, Quantization
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Config
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.running_model import DTYPES


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a part runs, and the model that runs there."""

    model: BenchModel
    placement: Placement
    device: torch.device
    """torch's name of the first device; on a TPU the host, where peers are refused."""
    dtype: torch.dtype
    cache: CacheConfig

    @classmethod
    def open(cls, job: Job) -> Bench:
        model = find_bench_model(job.model)
        size = job.size or (job.sizes or model.default_sizes)[0]
        placement = make_placement(job.mesh, workload=lambda: model.workload(model.settings(size)))
        device = torch.device("cuda" if placement.platform == "gpu" else "cpu")
        return cls(model, placement, device, DTYPES[job.dtype], CacheConfig(directory=Path(job.cache_directory)))

    @property
    def torch_refusal(self) -> str | None:
        """Why torch's peers cannot run on this device; None where they can."""
        if self.placement.platform == "tpu":
            return "diffusers has no TPU backend; the peers are measured on NVIDIA GPUs and CPUs"
        if self.device.type == "cuda" and not torch.cuda.is_available():
            return "jax sees a GPU that torch does not; install a torch with CUDA"
        return None

    @property
    def batch(self) -> int:
        """Videos of a measured forward: one for each part of the mesh that divides the batch."""
        return self.placement.sizes.dp

    def component(self, spec: ComponentSpec, config: Config, quantize: Quantization = "none") -> Component:
        return Component(spec, config, self.placement, dtype=self.dtype, cache=self.cache, quantize=quantize)

    def forward_settings(self, size: str) -> GenerationSettings:
        return self.model.forward_settings(size, self.batch)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator).to(dtype or self.dtype)

    def array(self, tensor: torch.Tensor) -> Any:
        """The tensor as an array of jax on the same devices."""
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
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_torch_memory() -> None:
    """torch keeps the memory it once had, and XLA cannot ask for it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
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
