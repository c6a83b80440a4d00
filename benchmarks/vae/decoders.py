"""A variant from its checkpoint to something that decodes: by a torch module, by our programs of it, by Flax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from safetensors.torch import load_file

from benchmarks.vae import whole_videos
from benchmarks.vae.choices import CONFIGURATIONS
from benchmarks.vae.inputs import Inputs
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.random_modules import empty_module
from comfy_tpu.bench.timing import Candidate, compile_module, stage_clock, torch_candidate
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.families.wan.vae import VAE


@dataclasses.dataclass
class Decoder:
    candidate: Candidate
    program: DeviceProgram | None = None


def prepare(variant: str, job: Job, bench: Bench, inputs: Inputs) -> Decoder:
    """Built and loaded; nothing is traced yet. Seconds of both are in the facts."""
    facts: dict[str, Any] = {}
    framework, _, form = variant.partition("-")
    if framework == "torchax":
        return _by_programs(_torchax(job, bench), _TORCHAX[form], bench, inputs, facts, channels=1)
    if framework == "nnx":
        from comfy_tpu.families.wan.nnx_vae import decoding

        functions: dict[str, Callable[..., Any]] = {
            "unrolled": decoding.decode_unrolled,
            "scanned": decoding.decode,
            "frames": decoding.decode_frame,
        }
        return _by_programs(_nnx(job, bench), functions[form], bench, inputs, facts, channels=-1)
    return _by_torch(variant, job, bench, inputs, facts)


_TORCHAX: dict[str, Callable[..., Any]] = {
    "unrolled": whole_videos.decode_unrolled,
    "scanned": whole_videos.decode_scanned,
    "frames": wan_vae.decode_frame,
}


def _torchax(job: Job, bench: Bench) -> Callable[[], Any]:
    config = CONFIGURATIONS[job.model]
    return lambda: Component(VAE, config, bench.placement, dtype=bench.dtype, cache=bench.cache)


def _nnx(job: Job, bench: Bench) -> Callable[[], Any]:
    from comfy_tpu.families.wan.nnx_vae import vae_component

    config = CONFIGURATIONS[job.model]
    return lambda: vae_component(config, bench.placement, dtype=bench.dtype, cache=bench.cache)


def _by_programs(
    build: Callable[[], Any],
    function: Callable[..., Any],
    bench: Bench,
    inputs: Inputs,
    facts: dict[str, Any],
    *,
    channels: int,
) -> Decoder:
    """`channels`: the dimension that has them in videos that are decoded whole."""
    component = _timed(facts, "build_s", build)
    checkpoint = Checkpoint.open(inputs.weights)
    weights = _timed(facts, "load_s", lambda: jax.block_until_ready(component.load(checkpoint)))
    frames = "latent" in function.__annotations__
    program = component.program(function, donate=("cache",) if frames else (), on_event=stage_clock(facts))
    if not frames:
        latents = bench.array(inputs.latents.movedim(1, channels).contiguous())
        return Decoder(
            Candidate(
                lambda: jax.block_until_ready(program(weights, latents=latents)),
                lambda video: bench.tensor(video).movedim(channels, 1),
                facts,
            ),
            program,
        )
    mean, deviation = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in _statistics())
    scaled = ((inputs.latents - mean) / deviation).split(1, dim=2)
    parts = [bench.array(part.contiguous()) for part in scaled]

    def by_frames() -> Any:
        cache, pictures = None, []
        for part in parts:
            pixels, cache = program(weights, latent=part, cache=cache)
            pictures.append(pixels)
        return jax.block_until_ready(pictures)

    def read(pictures: Any) -> torch.Tensor:
        return bench.tensor(jnp.concatenate(pictures, axis=1)).movedim(-1, 1) * 2 - 1

    return Decoder(Candidate(by_frames, read, facts), program)


def _statistics() -> tuple[list[float], list[float]]:
    module: Any = empty_module(VAE, {})
    return wan_vae.latent_statistics(module.config)


def _by_torch(variant: str, job: Job, bench: Bench, inputs: Inputs, facts: dict[str, Any]) -> Decoder:
    module = _timed(facts, "build_s", lambda: empty_module(VAE, CONFIGURATIONS[job.model]))

    def load() -> None:
        tensors = load_file(inputs.weights / "diffusion_pytorch_model.safetensors", device=str(bench.device))
        module.load_state_dict(tensors, assign=True)
        module.eval().requires_grad_(False)

    _timed(facts, "load_s", load)
    model: Any = compile_module(module, ("decoder",)) if variant == "compile" else module
    latents = inputs.latents.to(bench.device, bench.dtype)
    candidate = torch_candidate(bench, lambda: model.decode(latents, return_dict=False)[0], facts=facts)
    return Decoder(candidate)


def _timed(facts: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = call()
    facts[name] = time.perf_counter() - begin
    return result
