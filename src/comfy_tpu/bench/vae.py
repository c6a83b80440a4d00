"""The VAE: a whole video or image decoded by every peer, frames left on the device.

torch.compile is given the decoder, which may see a few frames at a time, not the loop around it: unrolled 21 times it
would be one program of 21 decoders.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bench.candidates import StageClock, choose, compiled, torch_candidate
from comfy_tpu.bench.devices import Bench, exact_float32, free_torch_memory, relative_error
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.modules import counted_operations, empty_module, in_float32, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Candidate, MeasureError, Prepare, ProgressCallback, time_interleaved
from comfy_tpu.bench.transformer import mesh_facts
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.config import VAE_BACKEND
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.pipeline.step import latent_shape
from comfy_tpu.pipeline.vae_backend import vae_functions


def measure_vae(job: Job, on_progress: ProgressCallback) -> None:
    bench = Bench.open(job)
    model, vae = bench.model, bench.model.family.vae
    config = model.config(vae.component)
    module: Any = random_module(vae.component, config, device=bench.device, dtype=bench.dtype)
    shape = latent_shape(model.family, model.latent_channels, model.settings(job.size))
    latents = bench.random(*shape, seed=8)

    def decode(decoder: Any, given: torch.Tensor) -> torch.Tensor:
        if model.reference is None:
            raise UnsupportedError(
                f"model={model.name}: its family has no reference.py, which says how diffusers runs it"
            )
        return model.reference.decode(decoder, given)

    def measure_error() -> MeasureError | None:
        try:
            with torch.no_grad(), exact_float32():
                expected = decode(in_float32(module, vae.component, config), latents.float()).clamp(-1, 1)
        except (torch.OutOfMemoryError, UnsupportedError) as error:
            on_progress.note(f"no error is measured: there is no float32 reference ({str(error).splitlines()[0]})")
            return None
        finally:
            free_torch_memory()
        return lambda output: relative_error(output.clamp(-1, 1), expected)

    def by_torch(decoder: Any) -> Candidate:
        return torch_candidate(bench, lambda: decode(decoder, latents), facts=mesh_facts(bench))

    peers: dict[str, Prepare] = {
        "ours": lambda: _ours(bench, module, latents),
        "eager": lambda: by_torch(module),
        "compile": lambda: by_torch(compiled(module, ("decoder",))),
    }
    meta = torch.empty(shape, device="meta")
    flops = (
        counted_operations(empty_module(vae.component, config), lambda empty: decode(empty, meta))
        if model.reference
        else None
    )
    row = Row("vae", "decode", "", size=job.size, flops=flops)
    time_interleaved(
        row, choose(job, peers), repeats=job.repeats, on_progress=on_progress, measure_error=measure_error()
    )


def decode_program(bench: Bench, component: Component, **options: Any) -> DeviceProgram:
    """The pipeline's program for one part of a video."""
    functions = vae_functions(VAE_BACKEND, bench.model.family)
    return component.program(functions.decode_frame, input_axes=functions.decode_axes, donate=("cache",), **options)


def _ours(bench: Bench, module: Any, latents: torch.Tensor) -> Candidate:
    """Our program over the frames, as the pipeline runs it, without the copies to the host."""
    facts: dict[str, Any] = dict(mesh_facts(bench))
    model, vae = bench.model, bench.model.family.vae
    config = model.config(vae.component)
    component = bench.component(vae.component, config)
    weights = component.load(HostWeights(module))
    program = decode_program(bench, component, on_event=StageClock(facts))
    # Peers are given the VAE's own latents; ours takes the transformer's, and begins by rescaling them.
    mean, deviation = (
        torch.tensor(values, device=bench.device).view(1, -1, 1, 1, 1)
        for values in vae.latent_statistics({**module.config, **config})
    )
    scaled = (latents.float() - mean) / deviation
    parts = [scaled] if vae.decodes_all_frames else scaled.split(1, dim=2)
    arrays = [bench.array(part.contiguous()) for part in parts]

    def call() -> list[jax.Array]:
        cache: Any = vae.first_cache(scaled.shape[2])
        frames = []
        for array in arrays:
            part, cache = program(weights, latent=array, cache=cache)
            frames.append(part)
        return jax.block_until_ready(frames)

    def read(frames: list[jax.Array]) -> torch.Tensor:
        decoded = bench.tensor(jnp.concatenate(frames, axis=1))  # [1, frames, height, width, 3] in 0..1
        return decoded.permute(0, 4, 1, 2, 3) * 2 - 1

    return Candidate(call, read, facts)


def compile_decode(bench: Bench, component: Component, program: DeviceProgram, size: str) -> None:
    """Compiles the programs that decode a video of this size, without weights or frames."""
    model, vae = bench.model, bench.model.family.vae
    shape = latent_shape(model.family, model.latent_channels, model.settings(size))
    if not vae.decodes_all_frames:
        shape = (*shape[:2], 1, *shape[3:])
    latent = jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = component.abstract_weights()
    frames = model.family.card.latent_frames(model.settings(size))
    cache: Any = vae.first_cache(frames)
    for _ in range(1 if vae.decodes_all_frames else min(2, frames)):
        program.compile(weights, latent=latent, cache=cache)
        cache = program.shapes(weights, latent=latent, cache=cache)[1]
