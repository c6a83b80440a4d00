"""Skeletons: structure and computed buffers, no weights, and torch's random numbers untouched."""

import threading

import torch

from comfy_tpu.bridge import build_skeleton, weight_shapes


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.randn(4) / 2)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("frequencies", torch.outer(torch.arange(3.0), torch.ones(2)), persistent=False)


def test_weights_are_on_meta_and_computed_buffers_are_real() -> None:
    module = build_skeleton(Model)
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in module.parameters())
    assert module.norm.running_mean.is_meta
    assert torch.equal(module.frequencies, Model().frequencies)
    assert not module.training


def test_tied_weights_stay_tied_and_are_listed_once() -> None:
    module = build_skeleton(Model)
    assert module.head.weight is module.embed.weight
    assert set(weight_shapes(module)) == {
        "embed.weight", "scale", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked",
    }  # fmt: skip


def test_building_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    build_skeleton(Model)
    assert torch.equal(torch.get_rng_state(), before)


def test_large_modules_take_no_memory() -> None:
    module = build_skeleton(lambda: torch.nn.Linear(2**20, 2**20))  # 4 TiB
    assert module.weight.is_meta


def test_another_thread_builds_real_modules_meanwhile() -> None:
    built: list[torch.nn.Module] = []

    def factory() -> torch.nn.Module:
        thread = threading.Thread(target=lambda: built.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return torch.nn.Linear(2, 2)

    assert build_skeleton(factory).weight.is_meta
    assert built[0].weight.device.type == "cpu"


def test_a_skeleton_built_in_inference_mode_is_an_ordinary_one():
    with torch.inference_mode():
        module = build_skeleton(lambda: torch.nn.BatchNorm1d(3))
    assert not any(tensor.is_inference() for tensor in [*module.parameters(), *module.buffers()])
