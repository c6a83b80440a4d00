"""From nothing to a program: run once with an empty cache, and again in a new process with the cache of the first.

Weights and inputs are abstract: nothing is loaded, and the time is that of tracing, lowering and compiling.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from comfy_tpu.bench.candidates import StageClock
from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.text import prompt_inputs
from comfy_tpu.bench.timing import ProgressCallback, failed
from comfy_tpu.bench.transformer import mesh_facts
from comfy_tpu.bench.vae import compile_decode, decode_program
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.pipeline.step import (
    StepPrograms,
    abstract_embeddings,
    abstract_state,
    latent_shape,
    place_prepared,
    split_prepared,
)

Compile = Callable[[Component, StageClock], None]


def measure_compilation(job: Job, on_progress: ProgressCallback) -> None:
    # Everything that these programs need is imported by now.
    imported = time.time() - job.started
    bench = Bench.open(job)
    family = bench.model.family
    parts: list[tuple[str, ComponentSpec, Compile]] = [
        ("transformer", family.transformer, functools.partial(_compile_step, bench, job.size)),
        ("vae decode", family.vae.component, functools.partial(_compile_decode, bench, job.size)),
    ]
    for encoder in family.text.encoders:
        name = encoder.component.name.replace("_", " ")
        parts.append((name, encoder.component, functools.partial(_compile_text, bench, encoder)))
    for what, spec, compile_ in parts:
        on_progress.note(f"{what}, {job.state}")
        row = Row("compile", f"{what}, {job.state}", "ours", size=job.size)
        on_progress.row(_compiled(bench, row, spec, compile_, imported))


def _compiled(bench: Bench, row: Row, spec: ComponentSpec, compile_: Compile, imported: float) -> Row:
    facts: dict[str, Any] = {"import_s": imported, **mesh_facts(bench)}
    begin = time.perf_counter()
    try:
        component = bench.component(spec, bench.model.config(spec))
        facts["build_s"] = time.perf_counter() - begin
        compile_(component, StageClock(facts))
    except Exception as error:  # noqa: BLE001 - a component that cannot be compiled is a result
        return failed(row, error)
    total = sum(facts.get(name, 0.0) for name in ("trace_s", "lower_s", "compile_s"))
    return dataclasses.replace(row, samples=(total,), facts=facts)


def _compile_step(bench: Bench, size: str, component: Component, clock: StageClock) -> None:
    model, settings = bench.model, bench.forward_settings(size)
    denoiser, weights = model.family.denoiser, component.abstract_weights()
    embeddings = abstract_embeddings(model.family, model.config(component.spec), settings)
    shapes = StepPrograms(denoiser, component.program).prepare(embeddings).shapes(weights, **embeddings)
    prompt_weights, prepared = split_prepared(place_prepared(component, denoiser, shapes))
    programs = StepPrograms(denoiser, functools.partial(component.program, on_event=clock))
    programs.compute().compile(
        {**weights, **prompt_weights},
        **abstract_state(latent_shape(model.family, model.latent_channels, settings)),
        prepared=prepared,
        guided=False,
    )


def _compile_decode(bench: Bench, size: str, component: Component, clock: StageClock) -> None:
    compile_decode(bench, component, decode_program(bench, component, on_event=clock), size)


def _compile_text(bench: Bench, encoder: TextEncoder, component: Component, clock: StageClock) -> None:
    tokens = {
        name: jax.ShapeDtypeStruct(tuple(tensor.shape), "int32")
        for name, tensor in prompt_inputs(bench, encoder).items()
    }
    component.program(encoder.encode, on_event=clock).compile(component.abstract_weights(), **tokens)
