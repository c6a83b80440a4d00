"""Skeletons: structure and computed buffers, no weights, and torch's random numbers untouched."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import build_skeleton, skeleton_limits, weight_shapes
from comfy_tpu.config import SkeletonLimits
from comfy_tpu.errors import SkeletonSizeError


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


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (lambda: torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in itertools.count()), "asks for more than 8 weights"),
        (lambda: torch.nn.Linear(101, 10), "asks for weights with more than 1000 numbers, and its checkpoint has 2"),
        (lambda: torch.arange(5001), r"asks for a table of shape \(5001,\), which no known model has"),
        (lambda: torch.randn(51, 100), r"asks for a table of shape \(51, 100\)"),
        (lambda: torch.outer(torch.ones(4096), torch.ones(2)), r"asks for a table of shape \(4096, 2\)"),
    ],
)
def test_modules_that_ask_for_too_much_are_stopped(factory: Callable[[], Any], text: str) -> None:
    limits = SkeletonLimits(tensors=8, elements=1000, computed=5000, error_suffix="and its checkpoint has 2")
    with pytest.raises(SkeletonSizeError, match=text):
        build_skeleton(factory, limits)


def test_limits_leave_room_for_tied_weights_and_dropped_layers() -> None:
    limits = skeleton_limits(tensor.shape for tensor in weight_shapes(build_skeleton(Model)).values())
    assert weight_shapes(build_skeleton(Model, limits)).keys() == weight_shapes(build_skeleton(Model)).keys()
    assert limits.error_suffix == "and its checkpoint has 7 with 61 numbers"


def test_a_factory_with_a_generator_of_its_own_is_not_disturbed() -> None:
    class Seeded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.randn(3, generator=torch.Generator().manual_seed(1)), persistent=False)

    assert torch.equal(build_skeleton(Seeded).noise, torch.randn(3, generator=torch.Generator().manual_seed(1)))


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
