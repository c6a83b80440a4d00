"""How the cost of a forward grows: with tokens on this device, and with devices on virtual ones of the host.

Virtual devices share the host's cores, so their wall time cannot fall; it may stay the same at best, and rises by what
is computed twice or moved about. What falls is XLA's count of operations a device, which is the strong scaling itself.
XLA counts the body of a loop once, here one block of the model, which leaves the slope as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch

from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.flops import transformer_operations
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.peers import chosen
from comfy_tpu.bench.references import random_module
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import Entrant, Listener, race
from comfy_tpu.bench.transformer import load_once, transformer_inputs, transformer_peers
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.host_weights import HostWeights
from comfy_tpu.config import MeshSizes
from comfy_tpu.families.wan.transformer import TRANSFORMER
from comfy_tpu.parallel.mesh import make_placement

_REPEATS = 3
"""At most: a curve has several sizes, and its slope does not hang on the fourth digit."""


def measure_tokens(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    config = job.configurations.transformer
    module = random_module(TRANSFORMER, config, device=bench.device, dtype=bench.dtype)
    load = load_once(bench, config, module)
    attention = "CUDNN_ATTENTION" if bench.device.type == "cuda" else ""
    for size in job.configurations.scaling_sizes:
        own = dataclasses.replace(job, size=str(size))
        operations = transformer_operations(config, size.tokens, job.configurations.text_tokens)
        facts = {"tokens": size.tokens, "attention_flops": operations.attention}
        row = Row("scaling", "forward", "", size=str(size), flops=operations.total, facts=facts)
        peers = transformer_peers(bench, own, module, load, attention=attention, facts=facts)
        race(row, chosen(job, peers), repeats=min(job.repeats, _REPEATS), listener=listener)


def measure_devices(job: Job, listener: Listener) -> None:
    bench = Bench.open(job)
    models = job.configurations
    own = dataclasses.replace(job, size=str(models.scaling_sizes[-1]))
    module = random_module(TRANSFORMER, models.transformer, device=torch.device("cpu"), dtype=bench.dtype)
    for count in models.scaling_devices:
        row = Row("scaling", f"small model on {count} virtual CPU devices", "", size=own.size)
        race(
            row,
            {"ours": lambda count=count: _over_devices(bench, own, module, count)},  # type: ignore[misc]
            repeats=min(job.repeats, _REPEATS),
            listener=listener,
        )


def _over_devices(bench: Bench, job: Job, module: torch.nn.Module, count: int) -> Entrant:
    placement = make_placement(MeshSizes(sp=count), devices=jax.devices("cpu"))
    component = Component(TRANSFORMER, job.configurations.transformer, placement, dtype=bench.dtype, cache=bench.cache)
    weights = component.load(HostWeights(module))
    program = component.program("forward", static=("return_dict",), output_axes=())
    inputs: dict[str, Any] = {**transformer_inputs(bench, job), "return_dict": False}
    costs: Any = program.lower(weights, **inputs).compile().cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs  # jax before 0.5 gave one for every device
    facts = {"tokens": job.video_size.tokens, "devices": count, "flops_per_device": float(costs["flops"])}
    return Entrant(lambda: jax.block_until_ready(program(weights, **inputs)), facts=facts)
