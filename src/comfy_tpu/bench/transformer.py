"""A forward of the transformer by every peer: its time, its error, its growth, and the best rates of the device.

Ours is a denoising step as the pipeline runs it: embeddings prepared once, then the velocity and the solver's weighted
sum. The peers are diffusers' own forward. A float32 copy of a large model would not fit beside the others, so the error
is that of the same module with two blocks of each kind, at its full width and the real number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from comfy_tpu.bench.job import VIRTUAL_DEVICES, Job
from comfy_tpu.bench.machine import Bench, disable_tf32, free_device_memory, relative_error
from comfy_tpu.bench.models import count_step_operations, reduce_layers
from comfy_tpu.bench.random_modules import float32_copy, random_module
from comfy_tpu.bench.results import Emit, Row
from comfy_tpu.bench.timing import (
    Candidate,
    compile_module,
    measure_peers,
    stage_clock,
    time_interleaved,
    time_repeated,
)
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.config import AttentionConfig, Quantization
from comfy_tpu.families.card import Config
from comfy_tpu.kernels.dispatch import attention
from comfy_tpu.parallel.chips import find_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.schedule import HISTORY
from comfy_tpu.pipeline.step import (
    StepPrograms,
    abstract_embeddings,
    abstract_state,
    latent_shape,
    place_prepared,
    split_prepared,
)

_TIMESTEP = 500.0
_SCALING_REPEATS = 3
"""At most: a curve has several sizes, and its slope does not hang on the fourth digit."""
_SQUARE, _SMALL_SQUARE = 8192, 512
_SDPA = {"cuda": ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"), "cpu": ("FLASH_ATTENTION",)}


def measure_transformer(job: Job, emit: Emit) -> None:
    bench = Bench.open(job, emit)
    is_single = bench.placement.sizes.device_count == 1
    sdpa = measure_ceilings(bench) if is_single else bench.default_attention
    free_device_memory()
    forward = Forward(bench, job.size, bench.model.config(bench.model.family.transformer))
    forward.measure(forward.make_row("transformer"), sdpa=sdpa)


def measure_accuracy(job: Job, emit: Emit) -> None:
    bench = Bench.open(job, emit)
    spec = bench.model.family.transformer
    config = reduce_layers(bench.model.config(spec))
    forward = Forward(bench, job.size, config)
    with torch.no_grad(), disable_tf32():
        expected = forward.run(float32_copy(forward.module, spec, config)).float()
    free_device_memory()
    row = forward.make_row("accuracy")
    facts = {name: value for name, value in row.facts.items() if name != "attention_flops"}
    row = dataclasses.replace(row, what="forward of 2 blocks", flops=None, facts=facts)
    forward.measure(row, repeats=0, measure_error=lambda output: relative_error(output, expected))


def measure_tokens(job: Job, emit: Emit) -> None:
    """The cost of a forward against its tokens."""
    bench = Bench.open(job, emit)
    config = bench.model.config(bench.model.family.transformer)
    forward: Forward | None = None
    for size in bench.model.scaling_sizes():
        forward = Forward(bench, size, config, forward)
        forward.measure(forward.make_row("scaling"), repeats=min(job.repeats, _SCALING_REPEATS))


def measure_devices(job: Job, emit: Emit) -> None:
    """The cost of a forward of a small model against virtual devices of the host.

    They share its cores, so that the wall time cannot fall; it may stay the same at best, and rises by the work that is
    repeated or moved. XLA's count of operations per device falls instead, which is the strong scaling itself. XLA
    counts the body of a loop once, here one block of the model, which leaves the slope as it is.
    """
    for count in VIRTUAL_DEVICES:
        bench = Bench.open(dataclasses.replace(job, mesh=f"sp={count}"), emit)
        size = bench.model.scaling_sizes()[-1]
        row = Row("scaling", f"small model on {count} virtual CPU devices", "", size=size)
        ours = {"ours": functools.partial(_over_devices, bench, size, count)}
        time_interleaved(row, ours, repeats=min(job.repeats, _SCALING_REPEATS), emit=emit)


def _over_devices(bench: Bench, size: str, count: int) -> Candidate:
    forward = Forward(bench, size, bench.model.config(bench.model.family.transformer))
    candidate = forward.step("none", {"tokens": forward.make_row("").facts["tokens"], "devices": count})
    component, _ = forward.load("none")
    weights, inputs = abstract_step(bench, component, size)
    programs = StepPrograms(bench.model.family.denoiser, component.program)
    costs: Any = programs.compute().lower(weights, **inputs).compile().cost_analysis()
    candidate.facts["flops_per_device"] = float(costs["flops"])
    return candidate


def describe_expectation(bench: Bench, work: Workload) -> dict[str, Any]:
    """Facts for `comfy-tpu port check --bench`: the classes of the transformer, and on a TPU the seconds that the
    formulas of `comfy-tpu plan` give for the same step."""
    placement, classes = bench.placement, list(bench.model.family.transformer.classes)
    slice_ = find_slice(placement.chip, placement.sizes.device_count)
    if slice_ is None:
        return {"classes": classes}
    return {"classes": classes, "expected_s": estimate(work, placement.sizes, slice_).step_seconds}


Load = Callable[[Quantization], tuple[Component, dict[str, jax.Array]]]


class Forward:
    """The inputs of one forward, the module of the peers, and our component with its weights."""

    def __init__(self, bench: Bench, size: str, config: Config, other: Forward | None = None) -> None:
        """`other`: a forward whose weights this one shares."""
        family = bench.model.family
        self.bench, self.size, self.settings = bench, size, bench.forward_settings(size)
        self.module: torch.nn.Module = (
            random_module(family.transformer, config, device=bench.device, dtype=bench.dtype)
            if other is None
            else other.module
        )
        self.load: Load = _load_once(bench, config, self.module) if other is None else other.load
        shape = latent_shape(family, bench.model.latent_channels, self.settings)
        self.latents = bench.random(*shape, seed=6, dtype=torch.float32)
        self.timestep = torch.full((1,), _TIMESTEP, device=bench.device)
        self.guidance_scale = torch.tensor(self.settings.guidance_scale, device=bench.device)
        self.embeddings: dict[str, torch.Tensor] = {}
        given = family.denoiser.settings_inputs(self.settings)
        for seed, (name, abstract) in enumerate(abstract_embeddings(family, config, self.settings).items(), start=7):
            if name in given:
                own = given[name][:1]  # the prompt's; others are of branches, which an unguided forward has not
                self.embeddings[name] = own.expand(abstract.shape).contiguous().to(bench.device)
            elif name.endswith("mask"):
                self.embeddings[name] = torch.ones(abstract.shape, device=bench.device, dtype=bench.dtype)
            else:
                self.embeddings[name] = bench.random(*abstract.shape, seed=seed)

    def make_row(self, part: str) -> Row:
        work = self.bench.model.workload(self.settings)
        linear, attention_flops = count_step_operations(work)
        facts = {"tokens": work.tokens, "attention_flops": attention_flops, **self.bench.mesh_facts}
        facts |= describe_expectation(self.bench, work)
        if self.bench.mesh_facts:
            facts["batch"] = self.settings.num_videos
        return Row(part, "forward", "", size=self.size, flops=linear + attention_flops, facts=facts)

    def measure(self, row: Row, *, sdpa: str | None = None, **options: Any) -> None:
        """Emits the peers' rows; `options` are those of `measure_peers`."""
        stacks = [stack.path for stack in self.bench.model.family.transformer.stacks if "." not in stack.path]
        parts = stacks if self.bench.job.regional else ()
        measure_peers(
            self.bench,
            row,
            ours={
                "ours": lambda: self.step("none", row.facts),
                "fp8": lambda: self.step("fp8", row.facts),
            },
            by_torch={
                "eager": lambda: functools.partial(self.run, self.module),
                "compile": lambda: functools.partial(self.run, compile_module(self.module, parts)),
            },
            sdpa=self.bench.default_attention if sdpa is None else sdpa,
            **options,
        )

    def run(self, module: Any) -> torch.Tensor:
        """diffusers' own forward."""
        return self.bench.model.find_reference().predict(
            module, self.latents, self.timestep, self.guidance_scale, self.settings, **self.embeddings
        )

    def step(self, quantize: Quantization, facts: Mapping[str, Any]) -> Candidate:
        """Our program of a step. Its coefficients keep the sample, so that every call computes the same."""
        bench, own, denoiser = self.bench, dict(facts), self.bench.model.family.denoiser
        component, weights = self.load(quantize)
        rows = {name: bench.array(tensor) for name, tensor in self.embeddings.items()}
        prepare = StepPrograms(denoiser, component.program).prepare(rows)
        prompt_weights, prepared = split_prepared(prepare(weights, **rows))
        compute = StepPrograms(denoiser, functools.partial(component.program, on_event=stage_clock(own))).compute()
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
            state[:] = compute({**weights, **prompt_weights}, samples=state[0], outputs=state[1], branches=1, **inputs)
            jax.block_until_ready(state)
            return state[1][0]

        return Candidate(call, bench.tensor, own)


def _load_once(bench: Bench, config: Config, module: torch.nn.Module) -> Load:
    """Our component with the module's weights, made when it is first needed."""

    @functools.cache
    def load(quantize: Quantization) -> tuple[Component, dict[str, jax.Array]]:
        component = bench.component(bench.model.family.transformer, config, quantize)
        return component, component.load(HostWeights(module))

    return load


def abstract_step(bench: Bench, component: Component, size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and inputs of our program of a step, without their data."""
    model, settings = bench.model, bench.forward_settings(size)
    denoiser, weights = model.family.denoiser, component.abstract_weights()
    embeddings = abstract_embeddings(model.family, model.config(component.spec), settings)
    shapes = StepPrograms(denoiser, component.program).prepare(embeddings).shapes(weights, **embeddings)
    prompt_weights, prepared = split_prepared(place_prepared(component, denoiser, shapes))
    state = abstract_state(latent_shape(model.family, model.latent_channels, settings))
    return {**weights, **prompt_weights}, {**state, "prepared": prepared, "branches": 1}


def measure_ceilings(bench: Bench) -> str:
    """Emits the best rates of this device: of large products, and of attention at the model's own length. The name of
    torch's fastest attention backend here, "" where none ran."""
    job, work = bench.job, bench.model.workload(bench.forward_settings(bench.job.size))
    # Long samples where a device clocks down under load: what counts is what it can keep up.
    least_s, square = (0.02, _SMALL_SQUARE) if bench.model.is_small else (0.3, _SQUARE)
    options: dict[str, Any] = {"repeats": job.repeats, "least_s": least_s, "emit": bench.emit}

    def time_jax(row: Row, peer: str, function: Callable[..., Any], *arrays: jax.Array) -> None:
        call = functools.partial(jax.jit(function), *arrays)
        time_repeated(dataclasses.replace(row, peer=peer), call, jax.block_until_ready, **options)

    def time_torch(row: Row, peer: str, call: Callable[[], torch.Tensor]) -> Row:
        with torch.no_grad():
            return time_repeated(dataclasses.replace(row, peer=peer), call, lambda _: bench.synchronize(), **options)

    for m, k, n in ((square, square, square), (work.tokens, work.hidden, work.ffn)):
        row = Row("ceilings", f"matmul {m}×{k}×{n}", "", size=job.size, flops=2.0 * m * k * n)
        a, b = bench.random(m, k, seed=1), bench.random(k, n, seed=2)
        time_jax(row, "jax", jnp.matmul, bench.array(a), bench.array(b))
        if bench.torch_refusal is None:
            time_torch(row, "torch", functools.partial(torch.matmul, a, b))
    shape = (1, work.heads, work.sequence, work.head_dim)
    flops = 4.0 * work.heads * work.sequence**2 * work.head_dim
    row = Row("ceilings", "attention", "", size=job.size, flops=flops)
    tensors = [bench.random(*shape, seed=seed) for seed in (3, 4, 5)]
    arrays = [bench.array(tensor) for tensor in tensors]
    ours = functools.partial(attention, placement=bench.placement, config=AttentionConfig())
    time_jax(row, "jax, as our program calls it", ours, *arrays)
    if bench.placement.platform == "gpu":
        # [batch, tokens, heads, head_dim] is cuDNN's own order: no transposition is timed.
        swapped = [jax.jit(lambda array: array.swapaxes(1, 2))(array) for array in arrays]
        time_jax(row, "jax cuDNN", functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), *swapped)
    if bench.torch_refusal is not None:
        return ""
    rows = {
        name: time_torch(row, f"torch {name}", functools.partial(_attend_by, name, tensors))
        for name in _SDPA[bench.device.type]
    }
    timed = {name: row.median_s for name, row in rows.items() if row.median_s is not None}
    return min(timed, key=lambda name: timed[name], default="")


def _attend_by(backend: str, qkv: Sequence[torch.Tensor]) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
