"""Loads a checkpoint of stacked and plain weights and writes its memory as JSON.

argv = directory, layers, and "whole" to read it all first.

A process of its own, because the high-water mark of memory cannot be set back and other tests move it.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.weights import WeightSlot, load_weights
from comfy_tpu.parallel.mesh import make_placement

directory, devices, layers = Path(sys.argv[1]), len(jax.devices()), int(sys.argv[2])
placement = make_placement("sp=2,tp=4" if devices == 8 else "single")


def slots(path: Path, count: int) -> tuple[Checkpoint, list[WeightSlot]]:
    checkpoint = Checkpoint.open(path)
    found = []
    for part in ("a", "b"):
        sources = tuple(f"blocks.{i}.{part}" for i in range(count))
        shape = (count, *checkpoint.tensors[sources[0]].shape)
        found.append(WeightSlot(f"blocks.*.{part}", sources, shape, jnp.bfloat16, placement.sharding(None, "tp", "sp")))
    shape = checkpoint.tensors["embed"].shape
    found.append(WeightSlot("embed", ("embed",), shape, jnp.bfloat16, placement.sharding(("sp", "tp"))))
    return checkpoint, found


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# Compiles and starts everything once, so that the mark moves for weights only.
load_weights(*slots(directory / "warm", 2))
before = memory("VmRSS")
checkpoint, wanted = slots(directory / "model", layers)
if len(sys.argv) > 3:  # what the loader must not do: the test shows that it would be noticed
    whole = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
arrays = load_weights(checkpoint, wanted)
resident = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
assert arrays["blocks.*.b"].dtype == jnp.bfloat16
last = jax.device_get(arrays["blocks.*.b"][-1, -1, -1])
sys.stdout.write(
    json.dumps({"peak": memory("VmHWM") - before, "resident": resident, "devices": devices, "last": float(last)})
)
