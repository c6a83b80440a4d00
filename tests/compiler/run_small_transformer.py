"""Loads and runs a small Wan transformer on a mesh of eight; prints what was compiled. The cache is the argument."""

import json
import sys
from pathlib import Path

import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import CacheConfig
from comfy_tpu.parallel.mesh import make_placement
from tests.parity import small_models

cache = CacheConfig(directory=Path(sys.argv[1]))
model = small_models.transformer()
events = []
with count_compilations() as count:
    component = Component(model.spec, model.config, make_placement("dp=2,sp=4"), dtype=torch.float32, cache=cache)
    weights = component.load(Checkpoint.open(model.checkpoint))
    program = component.program(static=("return_dict",), on_event=events.append)
    inputs = {
        "hidden_states": torch.ones(2, 4, 3, 6, 10),
        "timestep": torch.tensor([5, 900]),
        "encoder_hidden_states": torch.ones(2, 7, 16),
    }
    (out,) = to_host(program(weights, **inputs, return_dict=False))
report = {
    "requested": count.requested,
    "compiled": count.compiled,
    "ready from cache": events[-1].from_cache,
    "checksum": float(out.double().sum()),
}
sys.stdout.write(json.dumps(report) + "\n")
