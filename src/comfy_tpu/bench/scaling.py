"""How the cost of a forward grows: with tokens on this device, and with devices on virtual ones of the host.

Virtual devices share the host's cores, so their wall time cannot fall; it may stay the same at best, and rises by the
work that is repeated or moved. XLA's count of operations per device falls instead, which is the strong scaling itself.
XLA counts the body of a loop once, here one block of the model, which leaves the slope as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from comfy_tpu.bench.candidates import choose
from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.job import VIRTUAL_DEVICES, Job
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Candidate, ProgressCallback, time_interleaved
from comfy_tpu.bench.transformer import Forward, default_attention, forward_row, load_once
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.pipeline.step import (
    StepPrograms,
    abstract_state,
    is_guided,
    latent_shape,
    place_prepared,
    split_prepared,
)

_REPEATS = 3
"""At most: a curve has several sizes, and its slope does not hang on the fourth digit."""


def measure_tokens(job: Job, on_progress: ProgressCallback) -> None:
    bench = Bench.open(job)
    config = bench.model.config(bench.model.family.transformer)
    sizes = bench.model.scaling_sizes()
    first = Forward.make(bench, sizes[0], config)
    load = load_once(bench, config, first.module)
    for size in sizes:
        row = forward_row(bench, "scaling", size)
        forward = Forward.make(bench, size, config, first.module)
        peers = forward.peers(bench, job, load, attention=default_attention(bench), facts=row.facts)
        time_interleaved(row, choose(job, peers), repeats=min(job.repeats, _REPEATS), on_progress=on_progress)


def measure_devices(job: Job, on_progress: ProgressCallback) -> None:
    for count in VIRTUAL_DEVICES:
        bench = Bench.open(_with_mesh(job, count))
        size = bench.model.scaling_sizes()[-1]
        row = Row("scaling", f"small model on {count} virtual CPU devices", "", size=size)
        time_interleaved(
            row,
            {"ours": functools.partial(_over_devices, bench, size, count)},
            repeats=min(job.repeats, _REPEATS),
            on_progress=on_progress,
        )


def _with_mesh(job: Job, count: int) -> Job:
    return dataclasses.replace(job, mesh=f"sp={count}")


def _over_devices(bench: Bench, size: str, count: int) -> Candidate:
    model = bench.model
    config = model.config(model.family.transformer)
    forward = Forward.make(bench, size, config)
    component = bench.component(model.family.transformer, config)
    weights = component.load(HostWeights(forward.module))
    facts = {"tokens": forward_row(bench, "", size).facts["tokens"], "devices": count}
    candidate = forward.step(bench, component, weights, facts)
    candidate.facts["flops_per_device"] = _counted_flops(bench, forward, component)
    return candidate


def _counted_flops(bench: Bench, forward: Forward, component: Any) -> float:
    family, weights = bench.model.family, component.abstract_weights()
    programs = StepPrograms(family.denoiser, component.program)
    shapes = programs.prepare(forward.embeddings).shapes(weights, **forward.embeddings)
    prompt_weights, prepared = split_prepared(place_prepared(component, family.denoiser, shapes))
    state = abstract_state(latent_shape(family, bench.model.latent_channels, forward.settings))
    guided = is_guided(family, forward.settings)
    lowered = programs.compute().lower({**weights, **prompt_weights}, **state, prepared=prepared, guided=guided)
    costs: Any = lowered.compile().cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs  # jax before 0.5 gave one for every device
    return float(costs["flops"])
