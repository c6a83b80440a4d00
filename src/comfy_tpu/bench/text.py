"""The UMT5 text encoder on one prompt by every peer."""

from __future__ import annotations

from typing import Any

import jax
import torch

from comfy_tpu.bench.devices import Bench, exact_float32, free_torch_memory, relative_error
from comfy_tpu.bench.flops import counted_operations
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.peers import StageClock, chosen, compiled, torch_entrant
from comfy_tpu.bench.references import empty_module, in_float32, random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Entrant, Judge, Listener, Prepare, race
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan.text import TEXT_ENCODER


def measure_text(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    config, tokens = job.configurations.text_encoder, job.configurations.text_tokens
    module = random_module(TEXT_ENCODER, config, device=bench.device, dtype=bench.dtype)
    ids, mask = prompt_tokens(config["vocab_size"], tokens, bench.device)

    # Without the mask: transformers looks at its values, which meta tensors have not, and it saves no operations.
    flops = counted_operations(empty_module(TEXT_ENCODER, config), lambda empty: empty(ids.to("meta")))
    row = Row("text", f"encode {tokens} tokens", "", flops=flops)

    def by_torch(model: Any) -> Entrant:
        return torch_entrant(bench, lambda: wan_text.encode_text(model, ids, mask))

    def ours() -> Entrant:
        facts: dict[str, Any] = {}
        component = Component(TEXT_ENCODER, config, bench.placement, dtype=bench.dtype, cache=bench.cache)
        weights = component.load(HostWeights(module))
        program = component.program(wan_text.encode_text, on_event=StageClock(facts))
        arrays = {"input_ids": bench.array(ids.int()), "attention_mask": bench.array(mask.int())}

        def call() -> jax.Array:
            output: jax.Array = program(weights, **arrays)
            return output.block_until_ready()

        return Entrant(call, bench.tensor, facts)

    peers: dict[str, Prepare] = {
        "ours": ours,
        "eager": lambda: by_torch(module),
        "compile": lambda: by_torch(compiled(module)),
    }
    judge = _judge(listener, module, job, ids, mask)
    race(row, chosen(job, peers), repeats=job.repeats, listener=listener, judge=judge)


def prompt_tokens(vocabulary: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt that fills a quarter of its room, as a long one does."""
    generator = torch.Generator().manual_seed(10)
    ids = torch.randint(3, vocabulary, (1, length), generator=generator)
    mask = torch.zeros(1, length, dtype=torch.int64)
    mask[:, : length // 4] = 1
    return (ids * mask).to(device), mask.to(device)


def _judge(listener: Listener, module: Any, job: Job, ids: torch.Tensor, mask: torch.Tensor) -> Judge | None:
    try:
        with torch.no_grad(), exact_float32():
            reference = in_float32(module, TEXT_ENCODER, job.configurations.text_encoder)
            expected = wan_text.encode_text(reference, ids, mask)
    except torch.OutOfMemoryError as error:
        listener.note(f"no error is measured: the float32 reference did not fit ({str(error).splitlines()[0]})")
        return None
    finally:
        free_torch_memory()
    return lambda output: relative_error(output, expected)
