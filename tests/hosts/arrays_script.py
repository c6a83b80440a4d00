"""A process of two, with two devices each: arrays, weights and a program over all four."""

import json
import sys

import jax
import numpy as np
import torch
from safetensors.torch import save_file

from comfy_tpu.bridge import TraceContext, to_device, to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.program import Program
from comfy_tpu.compiler.weights import WeightSlot, load_weights, put
from comfy_tpu.config import HostsConfig
from comfy_tpu.parallel import hosts
from comfy_tpu.parallel.mesh import make_placement


class CountedTensor(torch.Tensor):
    """A tensor that counts the elements cut from it."""

    cut = 0

    def __getitem__(self, index):
        piece = super().__getitem__(index)
        CountedTensor.cut += piece.numel()
        return piece.as_subclass(torch.Tensor)


def run(directory):
    placement = make_placement("dp=2,tp=2")
    found = {"devices": [len(jax.devices()), len(jax.local_devices())], "first": hosts.is_first_host()}
    found["processes"] = np.vectorize(lambda device: device.process_index)(placement.mesh.devices).tolist()

    values = torch.arange(48, dtype=torch.float32).reshape(4, 12)
    split = placement.sharding("dp", "tp")
    found["round trip"] = bool((to_host(to_device(values, split)) == values).all())
    found["replicated"] = bool((to_host(to_device(values, placement.sharding())) == values).all())
    found["integers"] = to_host(to_device(torch.arange(4), placement.sharding("dp"))).tolist()

    for name, keep in (("cut to keep", True), ("cut to use", False)):
        CountedTensor.cut = 0
        put(values.as_subclass(CountedTensor), np.dtype("float16"), split, keep=keep)
        found[name] = CountedTensor.cut

    module = torch.nn.Linear(12, 8)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, 96).reshape(8, 12))
        module.bias.fill_(0.5)
    expected = module(values)
    path = directory / f"{jax.process_index()}.safetensors"
    save_file({f"{name}": tensor.detach() for name, tensor in module.state_dict().items()}, path)
    slots = [
        WeightSlot("weight", ("weight",), (8, 12), np.dtype("float32"), placement.sharding("tp")),
        WeightSlot("bias", ("bias",), (8,), np.dtype("float32"), placement.sharding("tp")),
    ]
    weights = load_weights(Checkpoint.open(path), slots)
    found["shards"] = [len(array.addressable_shards) for array in weights.values()]
    program = Program(
        module.to("meta"),
        context=TraceContext(placement=placement),
        input_axes={"input": ("dp",)},
        output_axes=("dp", "tp"),
    )
    made = program(weights, input=jax.numpy.asarray(values.numpy()))  # an array of this process alone
    found["error"] = float((to_host(made) - expected).abs().max() / expected.abs().max())
    again = program(weights, input=program.place("input", values))
    found["placed"] = bool((to_host(again) == to_host(made)).all())
    return found


if __name__ == "__main__":
    from pathlib import Path

    number, port, directory = sys.argv[1:]
    config = HostsConfig(f"localhost:{port}", 2, int(number))
    with hosts.start_hosts(config, report=lambda sentence: sys.stderr.write(sentence)):
        hosts.start_devices(config)
        found = run(Path(directory))
    sys.stdout.write("\n" + json.dumps(found) + "\n")
