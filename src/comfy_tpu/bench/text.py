"""The text encoders on one prompt by every peer. The peers run the module that our program is traced from."""

from __future__ import annotations

from typing import Any

import jax
import torch

from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench
from comfy_tpu.bench.random_modules import PROMPT, RandomFiles, build_ours, measure_module, random_module
from comfy_tpu.bench.results import Emit, Row
from comfy_tpu.bench.timing import Candidate, compile_module, stage_clock
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.pipeline.text import tokenize, vocabulary_size


def measure_text(job: Job, emit: Emit) -> None:
    bench = Bench.open(job, emit)
    for encoder in bench.model.family.text.encoders:
        if not encoder.takes:  # one that reads another's embeddings has no tokens to be given, and little to do
            _measure(bench, encoder)


def prompt_inputs(bench: Bench, encoder: TextEncoder) -> dict[str, torch.Tensor]:
    """Random tokens in the shapes that the family's tokenization gives; they fill a quarter of the prompt's room, as a
    long prompt does."""
    room = bench.model.defaults.max_sequence_length
    inputs = tokenize(RandomFiles.make(bench), encoder, [PROMPT], room).inputs
    vocabulary = vocabulary_size(bench.model.config(encoder.component))
    width = inputs["input_ids"].shape[1]
    visible = width - 3 * min(encoder.length or room, width) // 4
    mask = (torch.arange(width) < visible).int().unsqueeze(0)
    ids = torch.randint(3, vocabulary, (1, width), generator=torch.Generator().manual_seed(10)).int()
    return {**inputs, "input_ids": ids * mask, "attention_mask": mask}


def _measure(bench: Bench, encoder: TextEncoder) -> None:
    spec, config = encoder.component, bench.model.config(encoder.component)
    module = random_module(spec, config, device=bench.device, dtype=bench.dtype, build=build_ours)
    inputs = {name: tensor.to(bench.device) for name, tensor in prompt_inputs(bench, encoder).items()}
    name = f"{spec.name} " if len(bench.model.family.text.encoders) > 1 else ""

    def encode(module: Any, **inputs: torch.Tensor) -> torch.Tensor:
        return next(iter(encoder.encode(module, **inputs).values()))

    def ours() -> Candidate:
        facts = dict(bench.mesh_facts)
        component = bench.component(spec, config)
        weights = component.load(HostWeights(module))
        program = component.program(encoder.encode, on_event=stage_clock(facts))
        arrays = {name: bench.array(tensor) for name, tensor in inputs.items()}

        def call() -> jax.Array:
            return jax.block_until_ready(next(iter(program(weights, **arrays).values())))

        return Candidate(call, bench.tensor, facts)

    measure_module(
        bench,
        Row("text", f"{name}encode {inputs['input_ids'].shape[1]} tokens", ""),
        spec=spec,
        module=module,
        call=encode,
        inputs=inputs,
        ours=ours,
        # The whole function: it calls the module's layers itself.
        compile_call=lambda: compile_module(lambda **inputs: encode(module, **inputs)),
        build=build_ours,
    )
