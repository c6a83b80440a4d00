"""The VAE: a video or image decoded by every peer, and encoded where the model takes images; left on the device.

torch.compile is given the decoder or the encoder, which may see a few frames at a time, not the loop around it:
unrolled 21 times it would be one program of 21 decoders.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.random_modules import measure_module, random_module
from comfy_tpu.bench.results import Emit, Row
from comfy_tpu.bench.timing import Candidate, OnEvent, compile_module, stage_clock
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.config import MESH_AXES
from comfy_tpu.families.media import first_frame_clips
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.pipeline.step import latent_shape
from comfy_tpu.pipeline.vae_backend import split_columns, vae_functions

Direction = Literal["decode", "encode"]


def measure_vae(job: Job, emit: Emit) -> None:
    bench = Bench.open(job, emit)
    spec = bench.model.family.vae.component
    module: Any = random_module(spec, bench.model.config(spec), device=bench.device, dtype=bench.dtype)
    for direction, shape in vae_inputs(bench, job.size).items():
        given = bench.random(*shape, seed=8)
        _measure(bench, direction, module, given if direction == "decode" else given.clamp(-1, 1))


def vae_inputs(bench: Bench, size: str) -> dict[Direction, tuple[int, ...]]:
    """Shapes of what diffusers' VAE is given: latents; and pixels, where the model's card says that it takes images."""
    family, settings = bench.model.family, bench.model.settings(size)
    videos, channels, _, *sides = latent_shape(family, bench.model.latent_channels, settings)
    latents = (videos, channels, family.card.latent_frames(settings), *sides)  # without those of a sound
    shapes: dict[Direction, tuple[int, ...]] = {"decode": latents}
    if family.card.image is not None:
        is_first_only = family.media is not None and family.media.clips is first_frame_clips
        frames = 1 if is_first_only else settings.num_frames
        shapes["encode"] = (1, 3, frames, settings.height, settings.width)
    return shapes


def _measure(bench: Bench, direction: Direction, module: Any, given: torch.Tensor) -> None:
    decodes = direction == "decode"
    part = "decoder" if decodes else "encoder"

    def call(module: Any, given: torch.Tensor) -> torch.Tensor:
        reference = bench.model.find_reference()
        return reference.decode(module, given) if decodes else reference.encode(module, given)

    measure_module(
        bench,
        Row("vae", bench.job.name_with_backend(direction), "", size=bench.job.size),
        spec=bench.model.family.vae.component,
        module=module,
        call=call,
        inputs={"given": given},
        ours=lambda: _ours(bench, direction, module, given),
        compile_call=lambda: functools.partial(call, compile_module(module, (part,))),
        comparable=lambda output: output.clamp(-1, 1) if decodes else output,
    )


@dataclasses.dataclass(frozen=True)
class VaeStream:
    """What our VAE is given of one video, part by part, as the pipeline does."""

    function: Callable[..., Any]
    axes: Mapping[str, Axes]
    columns: int
    """Of the latents."""
    parts: Sequence[Mapping[str, torch.Tensor]]
    """Inputs besides the cache."""
    first_cache: Callable[[], Any] = lambda: None
    has_cache: bool = True

    @classmethod
    def decode(cls, bench: Bench, latents: torch.Tensor) -> VaeStream:
        """`latents`: of the transformer."""
        vae, functions = bench.model.family.vae, vae_functions(bench.job.vae_backend, bench.model.family)
        parts = [{"latent": part} for part in ([latents] if vae.decodes_all_frames else latents.split(1, dim=2))]
        first_cache = functools.partial(vae.first_cache, latents.shape[2])
        return cls(functions.decode_frame, functions.decode_axes, latents.shape[-1], parts, first_cache)

    @classmethod
    def encode(cls, bench: Bench, pixels: torch.Tensor) -> VaeStream:
        """`pixels`: [1, 3, frames, height, width] in -1..1."""
        family, card = bench.model.family, bench.model.family.card
        rows, columns = (side // card.spatial_scale for side in pixels.shape[3:])
        if family.vae.encode_image is not None:
            image = pixels[:, :, 0].permute(0, 2, 3, 1).add(1).div(2)
            # Without noise the latents are the middle of what the VAE sees, as the peers' are.
            part = {"image": image, "noise": pixels.new_zeros(1, bench.model.latent_channels, 1, rows, columns)}
            axes = {"image": (None, None, MESH_AXES)}
            return cls(family.vae.encode_image, axes, columns, [part], has_cache=False)
        functions = vae_functions(bench.job.vae_backend, family)
        assert functions.encode_frames is not None
        frames = [1, *[card.temporal_scale] * ((pixels.shape[2] - 1) // card.temporal_scale)]
        parts = [{"pixels": part} for part in pixels.split(frames, dim=2)]
        return cls(functions.encode_frames, functions.encode_axes, columns, parts)

    def program(self, component: Component, clock: OnEvent) -> DeviceProgram:
        axes = split_columns(self.axes, self.columns, component.placement)
        donate = ("cache",) if self.has_cache else ()
        return component.program(self.function, input_axes=axes, donate=donate, on_event=clock)

    def run(self, compute: Callable[..., Any], parts: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The outputs of `compute` for every part, each with the cache of the one before."""
        cache, outputs = self.first_cache(), []
        for part in parts:
            if self.has_cache:
                output, cache = compute(**part, cache=cache)
            else:
                output = compute(**part)
            outputs.append(output)
        return outputs


def _ours(bench: Bench, direction: Direction, module: Any, given: torch.Tensor) -> Candidate:
    """Our program over the parts of a video, without the copies to the host."""
    facts, model = dict(bench.mesh_facts), bench.model
    spec = model.family.vae.component
    component = bench.component(spec, model.config(spec))
    weights = component.load(HostWeights(module))
    # Peers have the VAE's own latents, and ours the transformer's: our programs rescale them.
    mean, deviation = (
        torch.tensor(values, device=bench.device).view(1, -1, 1, 1, 1)
        for values in model.family.vae.latent_statistics({**module.config, **model.config(spec)})
    )
    if direction == "decode":
        stream = VaeStream.decode(bench, (given.float() - mean) / deviation)
    else:
        stream = VaeStream.encode(bench, given.float())
    program = stream.program(component, stage_clock(facts))
    arrays = [{name: bench.array(tensor.contiguous()) for name, tensor in part.items()} for part in stream.parts]

    def call() -> list[jax.Array]:
        return jax.block_until_ready(stream.run(functools.partial(program, weights), arrays))

    def read(outputs: list[jax.Array]) -> torch.Tensor:
        if direction == "encode":
            return bench.tensor(jnp.concatenate(outputs, axis=2)) * deviation + mean
        decoded = bench.tensor(jnp.concatenate(outputs, axis=1))  # [1, frames, height, width, 3] in 0..1
        return decoded.permute(0, 4, 1, 2, 3) * 2 - 1

    return Candidate(call, read, facts)


def compile_vae(bench: Bench, direction: Direction, size: str, component: Component, clock: OnEvent) -> None:
    """Compiles the programs for a video of this size, without weights or frames."""
    shape = vae_inputs(bench, size)[direction]
    stream = getattr(VaeStream, direction)(bench, torch.empty(shape, device="meta"))
    program, weights = stream.program(component, clock), component.abstract_weights()

    def compute(**inputs: Any) -> Any:
        program.compile(weights, **inputs)
        return program.shapes(weights, **inputs)

    parts = stream.parts[:3]  # the cache has its final shape after two
    stream.run(
        compute,
        [{name: jax.ShapeDtypeStruct(tuple(t.shape), jnp.float32) for name, t in part.items()} for part in parts],
    )
