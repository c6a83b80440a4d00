"""VAE: a whole video decoded and encoded by every peer, frames left on the device.

torch.compile is given the decoder and the encoder, which see a few frames at a time, not the loop around them: unrolled
21 times it would be one program of 21 decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bench.devices import Bench, exact_float32, free_torch_memory, relative_error
from comfy_tpu.bench.flops import counted_operations
from comfy_tpu.bench.job import TEMPORAL, Job, VideoSize
from comfy_tpu.bench.peers import StageClock, chosen, compiled, torch_entrant
from comfy_tpu.bench.references import empty_module, in_float32, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Entrant, Judge, Listener, Prepare, race
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.families.wan.vae import VAE, encode_moments
from comfy_tpu.quiet import quiet

Run = Callable[[Any, torch.Tensor], torch.Tensor]
"""A peer's whole call on its module."""


def decode(module: Any, latents: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module.decode(latents, return_dict=False)[0]
    return output


def encode(module: Any, pixels: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module._encode(pixels)  # the moments: `encode` wraps them in a distribution
    return output


def measure_vae(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    config = job.configurations.vae
    module = random_module(VAE, config, device=bench.device, dtype=bench.dtype)
    channels = _channels(module)
    size = job.video_size
    _measure(bench, job, listener, module, "decode", decode, bench.random(1, channels, *size.latent, seed=8))
    free_torch_memory()
    pixels = bench.random(1, 3, size.frames, size.height, size.width, seed=9).clamp(-1, 1)
    _measure(bench, job, listener, module, "encode", encode, pixels)


def _measure(bench: Bench, job: Job, listener: Listener, module: Any, what: str, run: Run, given: torch.Tensor) -> None:
    config = job.configurations.vae
    row = Row("vae", what, "", size=job.size, flops=_operations(config, run, given))
    judge = _judge(listener, module, config, run, given)

    def by_torch(model: Any) -> Entrant:
        return torch_entrant(bench, lambda: run(model, given))

    ours = {"decode": decode_call, "encode": encode_call}[what]
    peers: dict[str, Prepare] = {
        "ours": lambda: ours(bench, job, module, given),
        "eager": lambda: by_torch(module),
        "compile": lambda: by_torch(compiled(module, ("decoder" if what == "decode" else "encoder",))),
    }
    race(row, chosen(job, peers), repeats=job.repeats, listener=listener, judge=judge)


def _judge(listener: Listener, module: Any, config: Mapping[str, Any], run: Run, given: torch.Tensor) -> Judge | None:
    try:
        with torch.no_grad(), exact_float32():
            expected = run(in_float32(module, VAE, config), given.float())
    except torch.OutOfMemoryError as error:
        listener.note(f"no error is measured: the float32 reference did not fit ({str(error).splitlines()[0]})")
        return None
    finally:
        free_torch_memory()
    return lambda output: relative_error(output, expected)


def _operations(config: Mapping[str, Any], run: Run, given: torch.Tensor) -> float:
    meta = torch.empty(given.shape, device="meta")
    return counted_operations(empty_module(VAE, config), lambda module: run(module, meta))


def decode_call(bench: Bench, job: Job, module: Any, latents: torch.Tensor) -> Entrant:
    """Our program over the frames, as the pipeline runs it, without the copies to the host."""
    facts: dict[str, Any] = {}
    component = Component(VAE, job.configurations.vae, bench.placement, dtype=bench.dtype, cache=bench.cache)
    weights = component.load(HostWeights(module))
    program = component.program(wan_vae.decode_frame, donate=("cache",), on_event=StageClock(facts))
    # Peers are given the VAE's own latents; ours takes the transformer's, and begins by rescaling them.
    mean, deviation = (
        torch.tensor(values, device=bench.device).view(1, -1, 1, 1, 1)
        for values in wan_vae.latent_statistics(module.config)
    )
    scaled = (latents.float() - mean) / deviation
    frames = [bench.array(scaled[:, :, index : index + 1].contiguous()) for index in range(scaled.shape[2])]

    def call() -> list[jax.Array]:
        cache, pictures = None, []
        for frame in frames:
            part, cache = program(weights, latent=frame, cache=cache)
            pictures.append(part)
        return jax.block_until_ready(pictures)

    def read(pictures: list[jax.Array]) -> torch.Tensor:
        whole = bench.tensor(jnp.concatenate(pictures, axis=1))  # [1, frames, height, width, 3] in 0..1
        return whole.permute(0, 4, 1, 2, 3) * 2 - 1

    return Entrant(call, read, facts)


def encode_call(bench: Bench, job: Job, module: Any, pixels: torch.Tensor) -> Entrant:
    facts: dict[str, Any] = {}
    component = Component(VAE, job.configurations.vae, bench.placement, dtype=bench.dtype, cache=bench.cache)
    weights = component.load(HostWeights(module))
    program = component.program(encode_moments, donate=("cache",), on_event=StageClock(facts))
    starts = [0, *range(1, pixels.shape[2], TEMPORAL)]
    parts = [pixels[:, :, start : 1 if start == 0 else start + TEMPORAL] for start in starts]
    frames = [bench.array(part.contiguous()) for part in parts]

    def call() -> list[jax.Array]:
        cache, moments = None, []
        for frame in frames:
            part, cache = program(weights, pixels=frame, cache=cache)
            moments.append(part)
        return jax.block_until_ready(moments)

    return Entrant(call, lambda moments: bench.tensor(jnp.concatenate(moments, axis=2)), facts)


def abstract_decode(component: Component, program: Any, size: VideoSize) -> None:
    """Compiles what decoding a video of this size takes, without weights or frames."""
    channels = _channels(component.module)
    _, height, width = size.latent
    latent = jax.ShapeDtypeStruct((1, channels, 1, height, width), jnp.float32)
    weights = component.abstract_weights()
    cache = None
    for _ in range(min(2, size.latent[0])):
        program.compile(weights, latent=latent, cache=cache)
        with quiet():
            lowered = program.lower(weights, latent=latent, cache=cache)
        cache = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info[1])


def _channels(module: Any) -> int:
    return int(module.config.z_dim)
