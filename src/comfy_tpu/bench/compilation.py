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

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.results import Emit, Row
from comfy_tpu.bench.text import prompt_inputs
from comfy_tpu.bench.timing import OnEvent, stage_clock
from comfy_tpu.bench.transformer import abstract_step
from comfy_tpu.bench.vae import compile_vae, vae_inputs
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.pipeline.step import StepPrograms

Compile = Callable[[Component, OnEvent], None]


def measure_compilation(job: Job, emit: Emit) -> None:
    # Everything that these programs need is imported by now.
    imported = time.time() - job.started
    bench = Bench.open(job, emit)
    family = bench.model.family
    programs: list[tuple[str, ComponentSpec, Compile]] = [
        ("transformer", family.transformer, functools.partial(_compile_step, bench, job.size))
    ]
    for direction in vae_inputs(bench, job.size):
        compile_parts = functools.partial(compile_vae, bench, direction, job.size)
        programs.append((job.name_with_backend(f"vae {direction}"), family.vae.component, compile_parts))
    for encoder in (each for each in family.text.encoders if not each.takes):  # the others read what these make
        name = encoder.component.name.replace("_", " ")
        programs.append((name, encoder.component, functools.partial(_compile_text, bench, encoder)))
    for what, spec, compile_ in programs:
        emit(f"{what}, {job.state}")
        row = Row("compile", f"{what}, {job.state}", "ours", size=job.size)
        emit(_measure(bench, row, spec, compile_, {"import_s": imported, **bench.mesh_facts}))


def _measure(bench: Bench, row: Row, spec: ComponentSpec, compile_: Compile, facts: dict[str, Any]) -> Row:
    begin = time.perf_counter()
    try:
        component = bench.component(spec, bench.model.config(spec))
        facts["build_s"] = time.perf_counter() - begin
        compile_(component, stage_clock(facts))
    except Exception as error:  # noqa: BLE001 - a component that cannot be compiled is a result
        return row.with_failure(error)
    total = sum(facts.get(name, 0.0) for name in ("trace_s", "lower_s", "compile_s"))
    return dataclasses.replace(row, samples=(total,), facts=facts)


def _compile_step(bench: Bench, size: str, component: Component, clock: OnEvent) -> None:
    weights, inputs = abstract_step(bench, component, size)
    programs = StepPrograms(bench.model.family.denoiser, functools.partial(component.program, on_event=clock))
    programs.compute().compile(weights, **inputs)


def _compile_text(bench: Bench, encoder: TextEncoder, component: Component, clock: OnEvent) -> None:
    inputs = prompt_inputs(bench, encoder).items()
    tokens = {name: jax.ShapeDtypeStruct(tuple(tensor.shape), "int32") for name, tensor in inputs}
    component.program(encoder.encode, on_event=clock).compile(component.abstract_weights(), **tokens)
