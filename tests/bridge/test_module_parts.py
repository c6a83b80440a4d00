"""Parts and tensors of a module, as torch itself lists them."""

import torch

from comfy_tpu.bridge import named_parts, named_tensors


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU()) for _ in range(2))
        self.shared = self.blocks[0][0]  # a part with two names
        self.absent = None
        self.register_module("empty", None)
        self.norm = torch.nn.BatchNorm1d(2)
        self.norm.weight = self.blocks[1][0].bias  # a tied weight
        self.register_parameter("unused", None)
        self.register_buffer("table", torch.zeros(3))


def test_parts_are_those_of_torch_in_its_order():
    module = Model()
    assert named_parts(module) == list(module.named_modules())


def test_tensors_are_those_of_torch():
    module = Model()
    found = named_tensors(named_parts(module))
    expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert found.keys() == expected.keys()
    assert all(found[name] is tensor for name, tensor in expected.items())
