"""The device of a part, for jax and for torch at once, and arrays that both see without a copy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from torch.utils.dlpack import from_dlpack

from comfy_tpu.bench.job import Job
from comfy_tpu.bridge import to_device
from comfy_tpu.compiler.weights import adopt
from comfy_tpu.config import CacheConfig
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.running_model import DTYPES


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a part runs."""

    placement: Placement
    device: torch.device
    """torch's name of the same device; on a TPU the host, where peers are refused."""
    dtype: torch.dtype
    cache: CacheConfig

    @classmethod
    def open(cls, job: Job) -> Bench:
        placement = make_placement("single")
        device = torch.device("cuda" if placement.platform == "gpu" else "cpu")
        return cls(placement, device, DTYPES[job.dtype], CacheConfig(directory=Path(job.cache_directory)))

    @property
    def torch_refusal(self) -> str | None:
        """Why torch's peers cannot run on this device; None where they can."""
        if self.placement.platform == "tpu":
            return "diffusers has no TPU backend; the peers are measured on NVIDIA GPUs and CPUs"
        if self.device.type == "cuda" and not torch.cuda.is_available():
            return "jax sees a GPU that torch does not; install a torch with CUDA"
        return None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator).to(dtype or self.dtype)

    def array(self, tensor: torch.Tensor) -> Any:
        """The tensor as an array of jax on the same device."""
        if tensor.device.type == "cpu":
            return to_device(tensor, self.placement.sharding())
        self.synchronize()
        return adopt(tensor, self.placement.sharding())

    def tensor(self, array: jax.Array) -> torch.Tensor:
        """The array as a tensor of torch on the same device."""
        return from_dlpack(array.block_until_ready())


def free_torch_memory() -> None:
    """torch keeps what it once had, and XLA cannot ask for it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """A float32 reference that is float32: torch lets cuDNN convolve it in TF32 otherwise."""
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
