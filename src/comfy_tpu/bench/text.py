"""The text encoders on one prompt by every peer. The peers run the module that our program is traced from."""

from __future__ import annotations

from typing import Any

import jax
import torch

from comfy_tpu.bench.candidates import StageClock, choose, torch_candidate
from comfy_tpu.bench.devices import Bench, exact_float32, free_torch_memory, relative_error
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.modules import build_ours, counted_operations, empty_module, in_float32, random_module
from comfy_tpu.bench.random_files import PROMPT, RandomFiles
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Candidate, MeasureError, Prepare, ProgressCallback, time_interleaved
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.pipeline.text import tokenize


def measure_text(job: Job, on_progress: ProgressCallback) -> None:
    bench = Bench.open(job)
    for encoder in bench.model.family.text.encoders:
        _measure(bench, job, encoder, on_progress)
        free_torch_memory()


def prompt_inputs(bench: Bench, encoder: TextEncoder) -> dict[str, torch.Tensor]:
    """Random tokens in the shapes that the family's tokenization gives; they fill a quarter of the prompt's room, as a
    long prompt does."""
    room = bench.model.defaults.max_sequence_length
    inputs = tokenize(RandomFiles.make(bench), encoder, [PROMPT], room).inputs
    config = bench.model.config(encoder.component)
    vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
    width = inputs["input_ids"].shape[1]
    visible = width - 3 * min(encoder.length or room, width) // 4
    mask = (torch.arange(width) < visible).int().unsqueeze(0)
    ids = torch.randint(3, vocabulary, (1, width), generator=torch.Generator().manual_seed(10)).int()
    return {**inputs, "input_ids": ids * mask, "attention_mask": mask}


def _measure(bench: Bench, job: Job, encoder: TextEncoder, on_progress: ProgressCallback) -> None:
    spec, config = encoder.component, bench.model.config(encoder.component)
    module = random_module(spec, config, device=bench.device, dtype=bench.dtype, build=build_ours)
    inputs = {name: tensor.to(bench.device) for name, tensor in prompt_inputs(bench, encoder).items()}

    def encode(encoder_module: Any) -> torch.Tensor:
        return next(iter(encoder.encode(encoder_module, **inputs).values()))

    def ours() -> Candidate:
        facts: dict[str, Any] = {}
        component = bench.component(spec, config)
        weights = component.load(HostWeights(module))
        program = component.program(encoder.encode, on_event=StageClock(facts))
        arrays = {name: bench.array(tensor) for name, tensor in inputs.items()}

        def call() -> jax.Array:
            return jax.block_until_ready(next(iter(program(weights, **arrays).values())))

        return Candidate(call, bench.tensor, facts)

    def measure_error() -> MeasureError | None:
        try:
            with torch.no_grad(), exact_float32():
                expected = encode(in_float32(module, spec, config, build_ours))
        except torch.OutOfMemoryError as error:
            on_progress.note(f"no error is measured: the float32 reference did not fit ({str(error).splitlines()[0]})")
            return None
        finally:
            free_torch_memory()
        return lambda output: relative_error(output, expected)

    peers: dict[str, Prepare] = {
        "ours": ours,
        "eager": lambda: torch_candidate(bench, lambda: encode(module)),
        "compile": lambda: torch_candidate(bench, _compiled_call(module, encode)),
    }
    meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    flops = counted_operations(empty_module(spec, config, build_ours), lambda empty: encoder.encode(empty, **meta))
    name = spec.name if len(bench.model.family.text.encoders) > 1 else ""
    row = Row("text", " ".join(filter(None, (name, f"encode {inputs['input_ids'].shape[1]} tokens"))), "", flops=flops)
    time_interleaved(
        row, choose(job, peers), repeats=job.repeats, on_progress=on_progress, measure_error=measure_error()
    )


def _compiled_call(module: torch.nn.Module, encode: Any) -> Any:
    """The whole function: it calls the module's layers itself."""
    torch._dynamo.reset()
    return torch.compile(lambda: encode(module), dynamic=False)
