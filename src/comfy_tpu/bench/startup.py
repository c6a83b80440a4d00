"""From nothing to a program: run once with an empty cache, and again in a new process with the cache it left.

Weights and inputs are abstract: nothing is loaded, and the time is that of tracing, lowering and compiling.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.peers import StageClock
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Listener, failed
from comfy_tpu.bench.vae import abstract_decode
from comfy_tpu.bridge.dtypes import numpy_dtype
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.families.wan.text import TEXT_ENCODER
from comfy_tpu.families.wan.transformer import TRANSFORMER
from comfy_tpu.families.wan.vae import VAE

Compile = Callable[[Component, StageClock], None]


def measure_startup(job: Job, listener: Listener) -> None:
    # Everything that these programs need is imported by now.
    imported = time.time() - job.started
    bench = Bench.open(job)
    models = job.configurations
    for what, spec, config, compile_ in (
        ("transformer", TRANSFORMER, models.transformer, _transformer(job, bench)),
        ("vae decode", VAE, models.vae, _vae(job)),
        ("text encoder", TEXT_ENCODER, models.text_encoder, _text(job)),
    ):
        listener.note(f"{what}, {job.state}")
        row = Row("compile", f"{what}, {job.state}", "ours", size=job.size)
        listener.row(_compiled(bench, row, spec, config, compile_, imported))


def _compiled(bench: Bench, row: Row, spec: ComponentSpec, config: Any, compile_: Compile, imported: float) -> Row:
    facts: dict[str, Any] = {"import_s": imported}
    begin = time.perf_counter()
    try:
        component = Component(spec, config, bench.placement, dtype=bench.dtype, cache=bench.cache)
        facts["build_s"] = time.perf_counter() - begin
        compile_(component, StageClock(facts))
    except Exception as error:  # noqa: BLE001 - a component that cannot be compiled is a result
        return failed(row, error)
    total = sum(facts.get(name, 0.0) for name in ("trace_s", "lower_s", "compile_s"))
    return dataclasses.replace(row, samples=(total,), facts=facts)


def _transformer(job: Job, bench: Bench) -> Compile:
    def compile_(component: Component, clock: StageClock) -> None:
        config, dtype = job.configurations.transformer, numpy_dtype(bench.dtype)
        program = component.program("forward", static=("return_dict",), on_event=clock)
        program.compile(
            component.abstract_weights(),
            hidden_states=jax.ShapeDtypeStruct((1, config["in_channels"], *job.video_size.latent), dtype),
            timestep=jax.ShapeDtypeStruct((1,), jnp.float32),
            encoder_hidden_states=jax.ShapeDtypeStruct((1, job.configurations.text_tokens, config["text_dim"]), dtype),
            return_dict=False,
        )

    return compile_


def _vae(job: Job) -> Compile:
    def compile_(component: Component, clock: StageClock) -> None:
        program = component.program(wan_vae.decode_frame, donate=("cache",), on_event=clock)
        abstract_decode(component, program, job.video_size)

    return compile_


def _text(job: Job) -> Compile:
    def compile_(component: Component, clock: StageClock) -> None:
        tokens = jax.ShapeDtypeStruct((1, job.configurations.text_tokens), jnp.int32)
        program = component.program(wan_text.encode_text, on_event=clock)
        program.compile(component.abstract_weights(), input_ids=tokens, attention_mask=tokens)

    return compile_
