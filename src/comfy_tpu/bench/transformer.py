"""One forward of the transformer (one CFG branch, batch 1) by every peer; and its error on a model cut short.

A float32 copy of the 14B would not fit beside the others, so the error is that of the same module with two blocks, at
its full width and the real number of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from comfy_tpu.bench.ceilings import measure_ceilings
from comfy_tpu.bench.devices import Bench, exact_float32, free_torch_memory, relative_error
from comfy_tpu.bench.flops import transformer_operations
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.peers import StageClock, chosen, compiled, torch_entrant
from comfy_tpu.bench.references import in_float32, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Entrant, Listener, Prepare, race
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.config import Quantization
from comfy_tpu.families.wan.transformer import TRANSFORMER

Load = Callable[[Quantization], tuple[Component, dict[str, jax.Array]]]

ACCURACY_BLOCKS = 2


def measure_transformer(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    attention = measure_ceilings(bench, job, listener)
    free_torch_memory()
    config = job.configurations.transformer
    operations = transformer_operations(config, job.video_size.tokens, job.configurations.text_tokens)
    row = Row(
        "transformer",
        "forward",
        "",
        size=job.size,
        flops=operations.total,
        facts={"tokens": job.video_size.tokens, "attention_flops": operations.attention},
    )
    module = random_module(TRANSFORMER, config, device=bench.device, dtype=bench.dtype)
    peers = transformer_peers(
        bench, job, module, load_once(bench, config, module), attention=attention, facts=row.facts
    )
    race(row, chosen(job, peers), repeats=job.repeats, listener=listener)


def measure_accuracy(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    config = {**job.configurations.transformer, "num_layers": ACCURACY_BLOCKS}
    facts = {"tokens": job.video_size.tokens, "blocks": ACCURACY_BLOCKS}
    row = Row("accuracy", f"forward of {ACCURACY_BLOCKS} blocks", "", size=job.size, facts=facts)
    module = random_module(TRANSFORMER, config, device=bench.device, dtype=bench.dtype)
    inputs = transformer_inputs(bench, job)
    with torch.no_grad(), exact_float32():
        reference = in_float32(module, TRANSFORMER, config)
        tensors = {name: tensor.float() for name, tensor in inputs.items()}
        expected = reference(**tensors, return_dict=False)[0].float()
        del reference
    free_torch_memory()
    # On a GPU the fastest that torch has there: it would take another one by itself.
    attention = "CUDNN_ATTENTION" if bench.device.type == "cuda" else ""
    peers = transformer_peers(bench, job, module, load_once(bench, config, module), attention=attention, facts=facts)
    race(
        row,
        chosen(job, peers),
        repeats=0,
        listener=listener,
        judge=lambda output: relative_error(output, expected),
    )


def transformer_inputs(bench: Bench, job: Job) -> dict[str, torch.Tensor]:
    config, size = job.configurations.transformer, job.video_size
    return {
        "hidden_states": bench.random(1, config["in_channels"], *size.latent, seed=6),
        "timestep": torch.full((1,), 500.0, device=bench.device),
        "encoder_hidden_states": bench.random(1, job.configurations.text_tokens, config["text_dim"], seed=7),
    }


def load_once(bench: Bench, config: Mapping[str, Any], module: torch.nn.Module) -> Load:
    """Our component with the module's weights, made when the first of several sizes wants it."""

    @functools.cache
    def load(quantize: Quantization) -> tuple[Component, dict[str, jax.Array]]:
        component = Component(
            TRANSFORMER, config, bench.placement, dtype=bench.dtype, cache=bench.cache, quantize=quantize
        )
        return component, component.load(HostWeights(module))

    return load


def transformer_peers(
    bench: Bench,
    job: Job,
    module: torch.nn.Module,
    load: Load,
    *,
    attention: str,
    facts: Mapping[str, Any],
) -> dict[str, Prepare]:
    inputs = transformer_inputs(bench, job)

    def ours(quantize: Quantization = "none") -> Entrant:
        own = dict(facts)
        component, weights = load(quantize)
        program = component.program("forward", static=("return_dict",), on_event=StageClock(own))
        arrays = {name: bench.array(tensor) for name, tensor in inputs.items()}

        def call() -> jax.Array:
            output: jax.Array = program(weights, **arrays, return_dict=False)[0]
            return output.block_until_ready()

        return Entrant(call, bench.tensor, own)

    def by_torch(model: torch.nn.Module) -> Entrant:
        def call() -> torch.Tensor:
            output: torch.Tensor = model(**inputs, return_dict=False)[0]
            return output

        return torch_entrant(bench, call, attention=attention, facts=facts)

    return {
        "ours": ours,
        "fp8": lambda: ours("fp8"),
        "eager": lambda: by_torch(module),
        "compile": lambda: by_torch(compiled(module, ("blocks",) if job.regional else ())),
    }
