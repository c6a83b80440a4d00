"""The inputs of all variants: random weights and latents, and the video that diffusers decodes from them in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.vae.choices import CONFIGURATIONS, VideoSize
from comfy_tpu.bench.job import SMALL_MODEL, Job
from comfy_tpu.bench.machine import Bench, disable_tf32
from comfy_tpu.bench.random_modules import float32_copy, random_module
from comfy_tpu.bench.results import Emit
from comfy_tpu.families.wan.vae import VAE

_WEIGHTS, _VIDEO = "vae", "video.safetensors"


@dataclasses.dataclass(frozen=True)
class Inputs:
    weights: Path
    """A directory with a checkpoint, as a model's."""
    latents: torch.Tensor
    """[1, channels, frames, height, width] in the VAE's own scale."""
    expected: torch.Tensor
    """[1, 3, frames, height, width] in -1..1."""

    @classmethod
    def read(cls, job: Job) -> Inputs:
        tensors = load_file(Path(job.inputs) / _VIDEO)
        return cls(Path(job.inputs) / _WEIGHTS, tensors["latents"], tensors["expected"])


def open_bench(job: Job) -> Bench:
    """The study's models are VAEs alone: a small Wan stands for the rest, which nothing here reads."""
    return Bench.open(dataclasses.replace(job, model=SMALL_MODEL, size=""))


def make_inputs(job: Job, emit: Emit) -> None:
    bench = open_bench(job)
    config = CONFIGURATIONS[job.model]
    module = random_module(VAE, config, device=bench.device, dtype=bench.dtype)
    reference: Any = float32_copy(module, VAE, config)
    latents = bench.random(1, reference.config.z_dim, *VideoSize.parse(job.size).latent, seed=8).float()
    with torch.no_grad(), disable_tf32():
        expected = reference.decode(latents, return_dict=False)[0]
    directory = Path(job.inputs)
    (directory / _WEIGHTS).mkdir(parents=True)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in module.state_dict().items()},
        directory / _WEIGHTS / "diffusion_pytorch_model.safetensors",
    )
    save_file({"latents": latents.cpu(), "expected": expected.cpu()}, directory / _VIDEO)
