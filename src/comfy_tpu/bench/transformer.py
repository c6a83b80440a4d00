"""One forward of the transformer by every peer, and its error on a model with few layers.

Ours is a denoising step as the pipeline runs it: embeddings prepared once, then the velocity and the solver's weighted
sum. The peers are diffusers' own forward. A float32 copy of a large model would not fit beside the others, so the error
is that of the same module with two blocks of each kind, at its full width and the real number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bench.candidates import StageClock, choose, compiled, torch_candidate
from comfy_tpu.bench.ceilings import measure_ceilings
from comfy_tpu.bench.devices import Bench, exact_float32, free_torch_memory, relative_error
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.models import operations, with_few_layers
from comfy_tpu.bench.modules import in_float32, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Candidate, Prepare, ProgressCallback, time_interleaved
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.config import GenerationSettings, Quantization
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.parallel.chips import slice_of
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.schedule import HISTORY
from comfy_tpu.pipeline.step import StepPrograms, abstract_embeddings, latent_shape, split_prepared

Load = Callable[[Quantization], tuple[Component, dict[str, jax.Array]]]

_TIMESTEP = 500.0


def measure_transformer(job: Job, on_progress: ProgressCallback) -> None:
    bench = Bench.open(job)
    is_single = bench.placement.sizes.device_count == 1
    attention = measure_ceilings(bench, job, on_progress) if is_single else default_attention(bench)
    free_torch_memory()
    config = bench.model.config(bench.model.family.transformer)
    row = forward_row(bench, "transformer", job.size)
    forward = Forward.make(bench, job.size, config)
    peers = forward.peers(bench, job, load_once(bench, config, forward.module), attention=attention, facts=row.facts)
    time_interleaved(row, choose(job, peers), repeats=job.repeats, on_progress=on_progress)


def measure_accuracy(job: Job, on_progress: ProgressCallback) -> None:
    bench = Bench.open(job)
    spec = bench.model.family.transformer
    config = with_few_layers(bench.model.config(spec))
    facts = {"tokens": forward_row(bench, "", job.size).facts["tokens"], **mesh_facts(bench)}
    row = Row("accuracy", "forward of 2 blocks", "", size=job.size, facts=facts)
    forward = Forward.make(bench, job.size, config)
    with torch.no_grad(), exact_float32():
        expected = forward.run(bench, in_float32(forward.module, spec, config)).float()
    free_torch_memory()
    load = load_once(bench, config, forward.module)
    peers = forward.peers(bench, job, load, attention=default_attention(bench), facts=facts)
    time_interleaved(
        row,
        choose(job, peers),
        repeats=0,
        on_progress=on_progress,
        measure_error=lambda output: relative_error(output, expected),
    )


def default_attention(bench: Bench) -> str:
    """On a GPU the fastest backend of torch there: torch would take another one by itself."""
    return "CUDNN_ATTENTION" if bench.device.type == "cuda" else ""


def forward_row(bench: Bench, part: str, size: str) -> Row:
    work = bench.model.workload(bench.forward_settings(size))
    linear, attention = operations(work)
    facts = {"tokens": work.tokens, "attention_flops": attention, **mesh_facts(bench), **expectation(bench, work)}
    return Row(part, "forward", "", size=size, flops=linear + attention, facts=facts)


def expectation(bench: Bench, work: Workload) -> dict[str, Any]:
    """What `comfy-tpu port check --bench` compares: the classes of the transformer, and the seconds that the formulas
    of `comfy-tpu plan` say for the same step; those only on a TPU, which they know."""
    placement, classes = bench.placement, list(bench.model.family.transformer.classes)
    slice_ = slice_of(placement.chip, placement.sizes.device_count)
    if slice_ is None:
        return {"classes": classes}
    return {"classes": classes, "expected_s": estimate(work, placement.sizes, slice_).step_seconds}


def mesh_facts(bench: Bench) -> dict[str, Any]:
    """Empty on one device."""
    sizes = bench.placement.sizes
    return {"mesh": str(sizes), "batch": bench.batch} if sizes.device_count > 1 else {}


def load_once(bench: Bench, config: Config, module: torch.nn.Module) -> Load:
    """Our component with the module's weights, made when it is first needed."""

    @functools.cache
    def load(quantize: Quantization) -> tuple[Component, dict[str, jax.Array]]:
        component = bench.component(bench.model.family.transformer, config, quantize)
        return component, component.load(HostWeights(module))

    return load


@dataclasses.dataclass(frozen=True)
class Forward:
    """The inputs of one forward, and the module of the peers."""

    module: torch.nn.Module
    settings: GenerationSettings
    latents: torch.Tensor
    timestep: torch.Tensor
    guidance_scale: torch.Tensor
    embeddings: Mapping[str, torch.Tensor]

    @classmethod
    def make(cls, bench: Bench, size: str, config: Config, module: torch.nn.Module | None = None) -> Forward:
        model, settings = bench.model, bench.forward_settings(size)
        if module is None:
            module = random_module(model.family.transformer, config, device=bench.device, dtype=bench.dtype)
        given = model.family.denoiser.settings_inputs(settings)
        embeddings: dict[str, torch.Tensor] = {}
        for seed, (name, abstract) in enumerate(abstract_embeddings(model.family, config, settings).items(), start=7):
            if name in given:
                embeddings[name] = given[name].expand(abstract.shape).contiguous().to(bench.device)
            elif name.endswith("mask"):
                embeddings[name] = torch.ones(abstract.shape, device=bench.device, dtype=bench.dtype)
            else:
                embeddings[name] = bench.random(*abstract.shape, seed=seed)
        shape = latent_shape(model.family, model.latent_channels, settings)
        return cls(
            module,
            settings,
            bench.random(*shape, seed=6, dtype=torch.float32),
            torch.full((1,), _TIMESTEP, device=bench.device),
            torch.tensor(settings.guidance_scale, device=bench.device),
            embeddings,
        )

    def run(self, bench: Bench, module: Any) -> torch.Tensor:
        """diffusers' own forward."""
        reference = bench.model.reference
        if reference is None:
            raise UnsupportedError(
                f"model={bench.model.name}: its family has no reference.py, which says how diffusers runs it"
            )
        return reference.predict(
            module, self.latents, self.timestep, self.guidance_scale, self.settings, **self.embeddings
        )

    def peers(
        self, bench: Bench, job: Job, load: Load, *, attention: str, facts: Mapping[str, Any]
    ) -> dict[str, Prepare]:
        def by_torch(module: Any) -> Candidate:
            return torch_candidate(bench, lambda: self.run(bench, module), attention=attention, facts=facts)

        stacks = [stack.path for stack in bench.model.family.transformer.stacks if "." not in stack.path]
        return {
            "ours": lambda: self.step(bench, *load("none"), facts),
            "fp8": lambda: self.step(bench, *load("fp8"), facts),
            "eager": lambda: by_torch(self.module),
            "compile": lambda: by_torch(compiled(self.module, stacks if job.regional else ())),
        }

    def step(
        self, bench: Bench, component: Component, weights: dict[str, jax.Array], facts: Mapping[str, Any]
    ) -> Candidate:
        """Our program of a step. Its coefficients keep the sample, so that every call computes the same."""
        own, denoiser = dict(facts), bench.model.family.denoiser
        rows = {name: bench.array(tensor) for name, tensor in self.embeddings.items()}
        prepare = StepPrograms(denoiser, component.program).prepare(rows)
        prompt_weights, prepared = split_prepared(prepare(weights, **rows))
        compute = StepPrograms(denoiser, functools.partial(component.program, on_event=StageClock(own))).compute()
        inputs = {
            "coefficients": bench.array(torch.eye(2 * HISTORY, device=bench.device)[0]),
            "timestep": bench.array(self.timestep),
            "guidance_scale": bench.array(self.guidance_scale),
            "prepared": prepared,
        }
        sample = jnp.copy(bench.array(self.latents))  # donated: the peers' latents must stay
        state = [[sample, *(jnp.zeros_like(sample) for _ in range(HISTORY - 1))]]
        state.append([jnp.zeros_like(sample) for _ in range(HISTORY)])

        def call() -> jax.Array:
            state[:] = compute(
                {**weights, **prompt_weights}, samples=state[0], outputs=state[1], guided=False, **inputs
            )
            jax.block_until_ready(state)
            return state[1][0]

        return Candidate(call, bench.tensor, own)
