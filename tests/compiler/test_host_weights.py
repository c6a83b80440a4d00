"""Weights of a module in host memory: read like a checkpoint, and watched."""

import gc
import weakref

import pytest
import torch

from comfy_tpu.compiler.host_weights import HostWeights, WeightChangeDetector


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.one.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("computed", torch.ones(2), persistent=False)
        self.requires_grad_(False)


NAMES = {"one.weight", "one.bias", "tied.bias", "kept"}


def replace(module, name, tensor):
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(tensor, requires_grad=False))


def watched(module):
    watch = WeightChangeDetector()
    watch.record(module)
    return watch


def test_a_source_of_weights():
    module = Model()
    source = HostWeights(module)
    assert set(source.tensors) == NAMES
    assert source.tensors["one.weight"].shape == (4, 4)
    assert source.tensors["one.weight"].dtype == torch.float32
    assert torch.equal(source.read("one.weight"), module.one.weight)
    assert source.read("one.weight").data_ptr() == module.one.weight.data_ptr(), "not a copy"
    assert str(source.path) == "Model"
    source.close()
    source.read("kept")


def test_a_quantized_weight_is_read_as_what_it_stands_for():
    class Quantized(torch.Tensor):
        _qdata = None  # the numbers

        def dequantize(self):
            return self.as_subclass(torch.Tensor) * 2

    module = Model()
    replace(module, "one.weight", torch.ones(4, 4).as_subclass(Quantized))
    assert torch.equal(HostWeights(module).read("one.weight"), torch.full((4, 4), 2.0))


def test_everything_changed_before_the_first_look():
    assert WeightChangeDetector().find_changed(Model()) == NAMES


def test_nothing_changed():
    module = Model()
    watch = watched(module)
    assert watch.find_changed(module) == set()
    module.one(torch.ones(1, 4))
    module.eval()
    assert watch.find_changed(module) == set()


def test_replaced_and_written_tensors():
    module = Model()
    watch = watched(module)
    replace(module, "one.bias", torch.zeros(4))
    module.kept.add_(1)
    module.computed.add_(1)
    assert watch.find_changed(module) == {"one.bias", "kept"}
    assert watch.find_changed(module) == {"one.bias", "kept"}, "until it is remembered"
    watch.record(module)
    assert watch.find_changed(module) == set()


def test_a_tensor_at_the_address_of_one_that_is_gone():
    """Addresses and ids are used again; that must not hide a change."""
    module = Model()
    watch = watched(module)
    for value in range(50):
        replace(module, "one.bias", torch.full((4,), float(value)))
        assert watch.find_changed(module) == {"one.bias"}
        watch.record(module)


def test_tensors_that_are_not_held():
    module = Model()
    watch = watched(module)
    old = weakref.ref(module.one.bias)
    replace(module, "one.bias", torch.zeros(4))
    gc.collect()
    assert old() is None
    assert watch.find_changed(module) == {"one.bias"}


def test_a_tied_weight_that_is_no_longer_tied():
    module = Model()
    watch = watched(module)
    replace(module, "tied.weight", torch.zeros(4, 4))
    assert watch.find_changed(module) == {"tied.weight"}


def test_a_weight_that_was_not_there_before():
    module = Model()
    watch = watched(module)
    module.register_buffer("later", torch.zeros(2))
    assert watch.find_changed(module) == {"later"}


def test_writes_that_torch_does_not_count():
    """Through `.data`; in every dtype that weights have."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64):
        module = Model()
        module.kept = torch.full((1000,), 3).to(dtype)
        watch = watched(module)
        module.kept.data.copy_(torch.full((1000,), 4).to(dtype))
        assert watch.find_changed(module) == {"kept"}, dtype
        assert watch.find_changed(module, closely=False) == {"kept"}, dtype


@pytest.mark.parametrize("shape", [(1024, 1024), (300, 2000), (3000, 40), (64, 32, 3, 3)], ids=str)
def test_partial_writes_that_torch_does_not_count(shape):
    """Into 1 % of a weight: some of its rows, or of its columns, anywhere."""
    module = Model()
    with torch.inference_mode():
        replace(module, "one.weight", torch.randn(shape))
        weight = module.one.weight
        watch = watched(module)
        for axis in (0, 1):
            part = -(-shape[axis] // 100)
            for start in range(0, shape[axis] - part, max(1, shape[axis] // 37)):
                weight.narrow(axis, start, part).mul_(1.0001)
                assert "one.weight" in watch.find_changed(module), (axis, start)
                watch.record(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_one_value_of_a_small_weight(dtype):
    """16 KB are compared whole."""
    module = Model()
    count = 16 * 1024 // dtype.itemsize
    with torch.inference_mode():
        for weight in (torch.zeros(count), torch.zeros(count // 64, 64).T):
            replace(module, "one.weight", weight.to(dtype))
            watch = watched(module)
            for place in range(0, count, count // 7):
                module.one.weight[divmod(place, weight.shape[1]) if weight.ndim > 1 else place] = 1
                for closely in (True, False):
                    assert watch.find_changed(module, closely=closely) == {"one.weight"}, place
                watch.record(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_partial_writes_to_a_weight_that_is_not_contiguous(dtype):
    """A transposed one, a part of a larger one, and a row that is repeated."""
    module = Model()
    with torch.inference_mode():
        large = torch.zeros(600, 1400).to(dtype)
        for weight in (large.T, large[:, 300:900], torch.zeros(1, 1400).to(dtype).expand(600, 1400)):
            assert not weight.is_contiguous()
            replace(module, "one.weight", weight)
            watch = watched(module)
            assert watch.find_changed(module) == set()
            own = weight if weight.stride(0) else weight[:1]
            for axis in (axis for axis in (0, 1) if weight.stride(axis)):
                part = -(-weight.shape[axis] // 100)
                for start in range(0, weight.shape[axis] - part, weight.shape[axis] // 7):
                    written = own.narrow(axis, start, part)
                    written.copy_(written.float().add(1).remainder(7))
                    assert watch.find_changed(module) == {"one.weight"}, (axis, start)
                    watch.record(module)
