"""A module in host memory, run on the devices: its weights follow it, and leave with it."""

import gc
import logging
import threading
import weakref

import jax
import pytest
import torch

from comfy_tpu.compiler import hosted as hosting
from comfy_tpu.compiler import residency as residencies
from comfy_tpu.compiler.hosted import HostedModule
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import AttentionConfig, ResidencyConfig
from comfy_tpu.errors import DeviceMemoryError, TraceError, UnsupportedError
from comfy_tpu.parallel.mesh import make_placement
from tests.tracing import relative_error

WIDTH = 16


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.q(self.norm(x)))


class Model(torch.nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x) * self.scale + self.table
        for block in self.blocks:
            x = block(x)
        return x


def forward(module, x):
    return type(module).forward(module, x)


@pytest.fixture
def residency():
    return Residency(ResidencyConfig())


def host(module, residency, *, mesh="single", dtype=torch.float32, **options):
    return HostedModule(
        module,
        name="model",
        placement=make_placement(mesh),
        dtype=dtype,
        attention=AttentionConfig(),
        residency=residency,
        **options,
    )


@pytest.fixture
def moved(monkeypatch):
    """Names of tensors that were brought to the devices."""
    names: list[str] = []
    read = hosting.HostWeights.read

    def reading(self, name):
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(hosting.HostWeights, "read", reading)
    return names


def assert_same(hosted, module, x=None):
    x = torch.randn(2, 5, WIDTH) if x is None else x
    assert relative_error(hosted(forward, x), module(x)) <= 1e-5


@pytest.mark.parametrize("mesh", ["single", "auto", "seed", "tp=8", "dp=2,sp=4"])
def test_the_same_as_torch_on_every_mesh(residency, mesh):
    module = Model()
    assert_same(host(module, residency, mesh=mesh), module)


def test_bfloat16(residency):
    module = Model()
    x = torch.randn(2, 5, WIDTH)
    got = host(module, residency, dtype=torch.bfloat16)(forward, x.bfloat16())
    assert 1e-5 < relative_error(got, module(x)) < 2e-2
    assert module.first.weight.dtype == torch.float32


def test_the_module_stays_as_it_was(residency):
    module = Model()
    before = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    modules = list(module.modules())
    host(module, residency)(forward, torch.randn(1, 2, WIDTH))
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert all(a is b for a, b in zip(module.modules(), modules, strict=True))
    assert module.training


def test_a_skeleton_copies_no_weight(residency):
    module = Model()
    skeleton = host(module, residency)._component.module
    assert all(weight.is_meta for weight in skeleton.parameters())
    assert not skeleton.table.is_meta


def test_results_are_ordinary_tensors(residency):
    module = Model()
    with torch.inference_mode():
        got = host(module, residency)(forward, torch.randn(1, 2, WIDTH))
        got += 1
    assert type(got) is torch.Tensor


@pytest.mark.parametrize("mesh", ["single", "seed"])
def test_only_changed_weights_move(residency, moved, mesh):
    module = Model()
    hosted = host(module, residency, mesh=mesh)
    assert_same(hosted, module)
    assert sorted(moved) == sorted(module.state_dict())
    moved.clear()
    assert_same(hosted, module)
    assert moved == []
    # Replaced, as ComfyUI's patches do.
    module.blocks[1].q.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    assert_same(hosted, module)
    assert moved == ["blocks.1.q.weight"]
    moved.clear()
    # Written in place.
    module.first.bias.add_(1)
    module.scale.mul_(2)
    assert_same(hosted, module)
    assert sorted(moved) == ["first.bias", "scale"]
    moved.clear()
    assert_same(hosted, module)
    assert moved == []
    assert hosted.compiled_count == 1


def test_a_weight_that_comes_back_moves_again(residency, moved):
    module = Model()
    hosted, x = host(module, residency), torch.randn(1, 3, WIDTH)
    before, original = hosted(forward, x), module.blocks[0].q.weight
    module.blocks[0].q.weight = torch.nn.Parameter(original * 2, requires_grad=False)
    changed = hosted(forward, x)
    assert relative_error(changed, before) > 1e-3
    module.blocks[0].q.weight = original
    moved.clear()
    assert torch.equal(hosted(forward, x), before)
    assert moved == ["blocks.0.q.weight"]


def test_weights_made_in_inference_mode(residency, moved):
    """ComfyUI's patches are made in it; such tensors have no version."""
    module = Model()
    hosted = host(module, residency)
    assert_same(hosted, module)
    for factor in (2, 3):
        with torch.inference_mode():
            module.first.weight = torch.nn.Parameter(torch.eye(WIDTH) * factor, requires_grad=False)
        moved.clear()
        assert_same(hosted, module)
        assert moved == ["first.weight"]


def test_how_much_moved_is_logged(residency, caplog):
    module = Model()
    hosted = host(module, residency)
    assert_same(hosted, module)
    module.first.weight.zero_()
    with caplog.at_level(logging.INFO, "comfy_tpu"):
        assert_same(hosted, module)
    assert "model: 1 weights changed, 0.000 GB moved" in caplog.text


def test_an_update_that_fails_leaves_nothing_half_changed(residency, monkeypatch):
    module = Model()
    hosted = host(module, residency)
    assert_same(hosted, module)
    module.first.weight.mul_(2)
    module.blocks[2].q.weight.mul_(2)

    def failing(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hosting, "update_weights", failing)
        with pytest.raises(KeyboardInterrupt):
            hosted(forward, torch.randn(1, 2, WIDTH))
    assert residency.entries() == ()
    assert_same(hosted, module)


def test_the_devices_are_freed_when_the_module_goes(residency):
    module = Model()
    hosted = host(module, residency)
    assert_same(hosted, module)
    assert [entry.label for entry in residency.entries()] == ["model"]
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert residency.entries() == ()
    assert sum(residency.bytes_per_device().values()) == 0
    with pytest.raises(UnsupportedError, match="model was given up by its owner; load it again"):
        hosted(forward, torch.randn(1, 2, WIDTH))


def test_a_module_that_goes_while_the_registry_looks_for_room(residency, monkeypatch):
    modules = [Model(), Model()]
    hosted = [host(module, residency) for module in modules]
    for each in hosted:
        each(forward, torch.randn(1, WIDTH))
    find_total = residencies._total

    def collect_garbage(entries):
        if len(modules) == 2:
            del modules[0]
            gc.collect()
        return find_total(entries)

    monkeypatch.setattr(residencies, "_total", collect_garbage)
    with residency.use("other", label="other", nbytes_per_device=residency.budget_bytes, load=dict):
        assert len(modules) == 1
        assert [entry.label for entry in residency.entries()] == ["other"]


def test_evicted_weights_come_back(residency, moved):
    module = Model()
    hosted = host(module, residency)
    assert_same(hosted, module)
    residency.clear()
    moved.clear()
    assert_same(hosted, module)
    assert len(moved) == len(module.state_dict())
    assert hosted.compiled_count == 1


def test_a_change_while_evicted(residency):
    module = Model()
    hosted = host(module, residency)
    assert_same(hosted, module)
    residency.clear()
    module.first.weight.mul_(3)
    assert_same(hosted, module)


def test_arguments_that_are_not_tensors(residency):
    def run(module, x, factor, options, *, switch=None):
        assert options["name"] == "a"
        out = module(x) * factor * options["factors"][1]
        return {"out": out if switch is None else out + switch, "none": x}

    module, x = Model(), torch.randn(1, 2, WIDTH)
    hosted = host(module, residency)
    options = {"name": "a", "factors": (1, 0.5), "nothing": None}
    got = hosted(run, x, 2.0, options, switch=torch.ones(1))
    assert relative_error(got["out"], run(module, x, 2.0, options, switch=torch.ones(1))["out"]) <= 1e-5
    assert relative_error(hosted(run, x, 3.0, options)["out"], run(module, x, 3.0, options)["out"]) <= 1e-5
    assert hosted.compiled_count == 2


@pytest.mark.parametrize(("one", "other"), [(1, True), (2, 2.0), (0, False), (1.0, True)])
def test_equal_constants_of_different_types_are_different_programs(residency, one, other):
    def run(module, x, constant):
        return x * (1 if isinstance(constant, bool) else 2 if isinstance(constant, int) else 3)

    module, x = Model(), torch.ones(1, 2, WIDTH)
    hosted = host(module, residency)
    for constant in (one, other):
        assert torch.equal(hosted(run, x, constant), run(module, x, constant))


def test_what_no_program_can_take_is_refused(residency):
    module = Model()
    hosted = host(module, residency)
    with pytest.raises(UnsupportedError, match="an argument holds a function, which a compiled program cannot take"):
        hosted(forward, lambda: 1)
    with pytest.raises(UnsupportedError, match="holds a object"):
        hosted(lambda module, x: x, {"deep": [object()]})


@pytest.mark.parametrize("trouble", [KeyError("sigmas"), AttributeError("none such"), RuntimeError("other sizes")])
def test_what_a_model_raises_while_it_is_traced(residency, trouble):
    """Somebody who hosts it may then run it without us."""

    def run(module, x):
        raise trouble

    module = Model()
    with pytest.raises(
        TraceError, match=f"model failed while it was traced at .*test_hosted.py:.*{type(trouble).__name__}"
    ):
        host(module, residency)(run, torch.randn(1, 2, WIDTH))


def test_a_value_that_is_needed_while_tracing(residency):
    def run(module, x):
        return x if x.sum() > 0 else -x

    module = Model()
    with pytest.raises(TraceError, match="the value of a tensor was needed for a decision .* at .*test_hosted.py"):
        host(module, residency)(run, torch.randn(1, 2, WIDTH))


def test_results_that_stay_on_the_devices(residency):
    module, x = Model(), torch.randn(2, 3, WIDTH)
    hosted = host(module, residency)
    there = hosted(forward, x, fetch=False)
    assert isinstance(there, jax.Array)
    assert relative_error(hosted(forward, there), module(module(x))) <= 1e-5


def test_inputs_are_not_written_to(residency):
    def run(module, x):
        x += 1
        return module(x)

    module, x = Model(), torch.randn(1, 2, WIDTH)
    kept = x.clone()
    got = host(module, residency)(run, x)
    assert torch.equal(x, kept)
    assert relative_error(got, module(x + 1)) <= 1e-5


def test_one_program_for_each_shape(residency):
    module = Model()
    hosted = host(module, residency)
    for batch in (1, 2, 1, 2):
        assert_same(hosted, module, torch.randn(batch, 3, WIDTH))
    assert hosted.compiled_count == 2


def test_from_several_threads(residency):
    module = Model()
    hosted, errors = host(module, residency), []

    def work(seed):
        x = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(seed))
        for _ in range(5):
            errors.append(relative_error(hosted(forward, x), module(x)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 20
    assert max(errors) <= 1e-5
    assert hosted.compiled_count == 1


def test_the_skeleton_may_be_prepared(residency):
    def prepare(skeleton):
        assert skeleton is not module
        skeleton.forward = None  # nobody else sees it

    module = Model()
    assert_same(host(module, residency, prepare=prepare), module)
    assert module.forward is not None


def test_loading_is_reported(residency):
    module, seen = Model(), []
    hosted = host(module, residency, on_load=lambda done, total: seen.append((done, total)))
    assert_same(hosted, module)
    total = sum(tensor.nbytes for tensor in module.state_dict().values())
    assert seen[-1] == (total, total)


def test_interrupted_loading_leaves_nothing_behind(residency):
    module = Model()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host(module, residency, on_load=stop)(forward, torch.randn(1, 2, WIDTH))
    assert residency.entries() == ()
    assert_same(host(module, residency), module)


def test_too_large_for_the_devices():
    module = Model()
    small = Residency(ResidencyConfig(budget_bytes=100))
    with pytest.raises(DeviceMemoryError, match="model needs"):
        host(module, small)(forward, torch.randn(1, 2, WIDTH))


def test_least_recently_used_goes_first(residency):
    one, other = Model(), Model()
    size = sum(tensor.nbytes for tensor in one.state_dict().values())
    small = Residency(ResidencyConfig(budget_bytes=int(size * 1.5)))
    hosted = [host(module, small) for module in (one, other)]
    for _ in range(2):
        assert_same(hosted[0], one)
        assert_same(hosted[1], other)
        assert len(small.entries()) == 1


def test_tied_weights(residency):
    module = Model()
    module.last = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    module.last.weight = module.first.weight

    def run(module, x):
        return module.last(type(module).forward(module, x))

    hosted, x = host(module, residency), torch.randn(1, 2, WIDTH)
    assert relative_error(hosted(run, x), run(module, x)) <= 1e-5
    replaced = torch.nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    module.first.weight = module.last.weight = replaced
    assert relative_error(hosted(run, x), run(module, x)) <= 1e-5


def test_a_batch_norm(residency):
    """It counts batches in an int64, which JAX does not hold."""
    module = (
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)).eval().requires_grad_(False)
    )
    module[1].running_mean.normal_()
    module[1].num_batches_tracked.fill_(7)

    def run(module, x):
        return module(x) * module[1].num_batches_tracked

    x = torch.randn(3, WIDTH)
    assert relative_error(host(module, residency)(run, x), run(module, x)) <= 1e-5
    assert module[1].num_batches_tracked.dtype == torch.int64


def test_a_weight_that_changes_its_dtype(residency):
    """ComfyUI may cast a weight while it patches it."""
    module = Model()
    hosted, x = host(module, residency), torch.randn(1, 2, WIDTH)
    assert_same(hosted, module, x)
    module.first.weight = torch.nn.Parameter(module.first.weight.bfloat16(), requires_grad=False)
    got = hosted(forward, x)
    module.first.weight = torch.nn.Parameter(module.first.weight.float(), requires_grad=False)
    assert relative_error(got, module(x)) <= 1e-5


def test_memory_that_runs_out_while_the_devices_compute(residency, monkeypatch):
    """A call returns before its results are computed: their errors come to whoever waits for them."""

    def full(results):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")

    module = Model()
    hosted = host(module, residency)
    results = hosted(forward, torch.ones(1, 2, WIDTH), fetch=False)
    monkeypatch.setattr(hosting, "to_host", full)
    with pytest.raises(DeviceMemoryError, match="model does not fit in device memory"):
        hosted.fetch(results)
    with pytest.raises(DeviceMemoryError, match="model does not fit in device memory"):
        hosted(forward, torch.ones(1, 2, WIDTH))
