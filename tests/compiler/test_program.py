"""Programs: compiled once per shape, ahead of time if asked, with progress, donation and clear refusals."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

from comfy_tpu.bridge import TraceContext, boundary, build_skeleton, scan, to_device, to_host
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.program import Program, ProgramEvent
from comfy_tpu.errors import DeviceMemoryError, InvalidValueError, TraceError, UnsupportedError, device_errors
from comfy_tpu.parallel.mesh import make_placement


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.kept: Any = None
        self.by_name: dict[str, Any] = {}
        self.shared = self.linear.shared = [0]

    def forward(self, x, extra=None, doubled=False):  # type: ignore[no-untyped-def]
        self.kept = x
        self.by_name["x"] = x
        self.shared.append(x)
        assert self.linear.shared is self.shared
        self.register_buffer("late", x)
        y = self.linear(x) + (0 if extra is None else extra["shift"][0])
        return {"y": y * 2 if doubled else y}

    def refine(self, x):  # type: ignore[no-untyped-def]
        return x + 1


reference = Model().requires_grad_(False)
weights = to_device(reference.state_dict())
x = torch.arange(12.0).reshape(3, 4)


def program(**options: Any) -> Program:
    return Program(build_skeleton(Model), **({"context": TraceContext()} | options))


def test_runs_and_compiles_once_per_shape_and_static_value() -> None:
    run = program(static=("doubled",))
    with count_compilations() as count:
        for _ in range(3):
            torch.testing.assert_close(to_host(run(weights, x=x))["y"], reference(x)["y"])
            run(weights, x=x + 1)
        assert run.compiled_count == 1
        torch.testing.assert_close(to_host(run(weights, x=x, doubled=True))["y"], reference(x)["y"] * 2)
        torch.testing.assert_close(to_host(run(weights, x=x[:2]))["y"], reference(x[:2])["y"])
        assert run.compiled_count == 3
    assert count.requested == 3


def test_nested_inputs_and_other_methods() -> None:
    extra = {"shift": [torch.ones(4)]}
    torch.testing.assert_close(to_host(program()(weights, x=x, extra=extra))["y"], reference(x, extra)["y"])
    torch.testing.assert_close(to_host(program(method="refine")(weights, x=x)), x + 1)


def test_compiled_ahead_the_first_call_compiles_nothing() -> None:
    events: list[ProgramEvent] = []
    run = program(name="model", on_event=events.append)
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in weights.items()}
    run.compile(abstract, x=jax.ShapeDtypeStruct((3, 4), np.float32, sharding=weights["linear.weight"].sharding))
    # The program is in the cache, or not, as other tests left it.
    misses = [] if events[-1].from_cache else ["cache_miss"]
    assert [event.stage for event in events] == ["tracing", "lowering", "compiling", *misses, "ready"]
    assert {event.program for event in events} == {"model"}
    with count_compilations() as count:
        run(weights, x=x)
    assert count.requested == 0
    assert len(events) == 4 + len(misses)


def test_a_program_is_kept_when_its_listener_ends_the_run() -> None:
    def cancel(event: ProgramEvent) -> None:
        if event.stage == "ready":
            raise InterruptedError

    run = program(on_event=cancel)
    with pytest.raises(InterruptedError):
        run(weights, x=x)
    torch.testing.assert_close(to_host(run(weights, x=x))["y"], reference(x)["y"])
    assert run.compiled_count == 1


def test_compiled_ahead_on_a_mesh() -> None:
    placement = make_placement("dp=2,sp=4")
    run = program(context=TraceContext(placement=placement), input_axes={"x": ("dp", "sp")})
    placed = jax.device_put(weights, placement.sharding())
    shape = jax.ShapeDtypeStruct((6, 4), np.float32)
    run.compile(placed, x=shape)
    with count_compilations() as count:
        out = run(placed, x=torch.ones(6, 4))["y"]
    assert count.requested == 0
    torch.testing.assert_close(to_host(out), reference(torch.ones(6, 4))["y"])


def test_compiled_with_the_options_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, given = [], []

    def choose(*devices: Any) -> dict[str, str | bool]:
        asked.append(devices)
        return {"xla_cpu_enable_fast_math": False}

    def compile_(lowered: Any, options: Any) -> Any:
        given.append(options)
        return lowered.compile(compiler_options=options)

    monkeypatch.setattr("comfy_tpu.compiler.program.choose_compiler_options", choose)
    monkeypatch.setattr("comfy_tpu.compiler.program.compile_lowered", compile_)
    placement = make_placement("dp=2,sp=4")
    program(context=TraceContext(placement=placement)).compile(jax.device_put(weights, placement.sharding()), x=x)
    program().compile(weights, x=x)
    assert asked == [("cpu", placement.chip, placement.sizes), ("cpu",)]
    assert given == [{"xla_cpu_enable_fast_math": False}] * 2


def test_donated_inputs_are_gone_and_others_are_not() -> None:
    array, extra = to_device(x), {"shift": [to_device(torch.ones(4))]}
    program(donate=("x",))(weights, x=array, extra=extra)
    assert array.is_deleted()
    assert not extra["shift"][0].is_deleted()


def test_outputs_are_placed_as_asked() -> None:
    placement = make_placement("dp=2,sp=4")
    run = program(method="refine", context=TraceContext(placement=placement), output_axes=(None, "sp"))
    assert run(jax.device_put(weights, placement.sharding()), x=x).sharding == placement.sharding(None, "sp")


def test_static_values_of_different_types_are_different_programs() -> None:
    class Scale(torch.nn.Module):
        def forward(self, x, by):  # type: ignore[no-untyped-def]
            return x * by

    run = Program(build_skeleton(Scale), context=TraceContext(), static=("by",))
    whole = torch.arange(3, dtype=torch.int32)
    assert to_host(run({}, x=whole, by=2)).dtype == torch.int32
    assert to_host(run({}, x=whole, by=2.0)).dtype == torch.float32
    assert run.compiled_count == 2
    with pytest.raises(InvalidValueError, match="a static input cannot be compared .*pass a tuple"):
        run({}, x=whole, by=[2])


def test_compiled_ahead_for_int64() -> None:
    run = program(method="refine")
    run.compile(weights, x=jax.ShapeDtypeStruct((3,), np.int64))
    with count_compilations() as count:
        run(weights, x=torch.arange(3))
    assert count.requested == 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"linear.weight": weights["linear.weight"]}, "1 weights are missing, among them linear.bias"),
        (
            weights | {"other.weight": weights["linear.bias"]},
            "weight other.weight is given, but the module has no such",
        ),
        (weights | {"linear.bias": weights["linear.weight"]}, r"linear.bias has shape \(4, 4\), expected \(4,\)"),
        (reference.state_dict(), "weight linear.weight is a Tensor, expected a jax array"),
    ],
)
def test_weights_that_are_not_the_modules_are_refused(given: Any, text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        program().compile(given, x=x)


def test_a_name_that_is_no_input_is_refused() -> None:
    with pytest.raises(
        InvalidValueError, match="Model.forward: donate names 'y', which is no input; inputs are x, extra"
    ):
        program(donate=("y",))


def test_a_result_that_is_no_tensor_is_named() -> None:
    class Named(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return x, "text"

    with pytest.raises(TraceError, match="returned a str, expected tensors.*return_dict=False"):
        Program(build_skeleton(Named), context=TraceContext())({}, x=x)


def test_a_plain_value_must_be_static() -> None:
    with pytest.raises(
        InvalidValueError, match=r"Model.forward: input 'doubled' holds a bool.*name the input in `static`"
    ):
        program()(weights, x=x, doubled=True)


def test_what_a_forward_keeps_on_the_module_does_not_stay() -> None:
    module = build_skeleton(Model)
    Program(module, context=TraceContext())(weights, x=x)
    assert module.kept is None
    assert module.by_name == {}
    assert module.shared == [0]
    assert module.linear.shared is module.shared
    assert not list(module.buffers())
    assert all(parameter.device.type == "meta" for parameter in module.parameters())


def test_several_threads_share_one_compilation() -> None:
    run, results, counts = program(), [], []

    def call() -> None:
        with count_compilations() as count:
            results.append(to_host(run(weights, x=x))["y"])
        counts.append(count.requested)

    with count_compilations() as elsewhere:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(counts) == [0, 0, 0, 1]
    assert elsewhere.requested == 0, "a thread counts its own"
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, reference(x)["y"])


def test_lowered_text_can_be_looked_at() -> None:
    assert "stablehlo.dot_general" in program().lower(weights, x=x).as_text()


def test_the_runtime_out_of_memory_error_becomes_ours() -> None:
    with (
        pytest.raises(DeviceMemoryError, match=r"vae does not fit in device memory \(RESOURCE_EXHAUSTED.*fewer frames"),
        device_errors("vae"),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), device_errors("vae"):
        raise jax.errors.JaxRuntimeError("INTERNAL: other")


def test_a_tensor_that_an_earlier_trace_left_behind_is_explained() -> None:
    kept: list[torch.Tensor] = []

    class Keeping(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x.cos())
            return x + kept[0]

    keeping = Program(Keeping(), context=TraceContext())
    keeping({}, x=torch.ones(3))
    with pytest.raises(TraceError, match="an earlier trace left behind.*buffer of the module.*porting.md#kept-tensor"):
        keeping({}, x=torch.ones(3, dtype=torch.bfloat16))


def test_what_a_platform_cannot_do_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, **options: object) -> None:
        raise NotImplementedError("MLIR translation rule for primitive 'eig' not found for platform tpu\nmore")

    monkeypatch.setattr(jax.stages.Traced, "lower", refuse)
    with pytest.raises(UnsupportedError, match=r"cannot be lowered \(MLIR.*for platform tpu\).*porting.md#lowering"):
        program()(weights, x=x)


def test_running_out_of_memory_is_ours_also_where_a_result_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(array: np.ndarray) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(boundary, "as_tensor", full)
    with pytest.raises(DeviceMemoryError, match="does not fit in device memory.*porting.md#out-of-memory"):
        to_host(weights)


def fails(module: Any, x: torch.Tensor) -> torch.Tensor:
    raise KeyError(float((x + torch.arange(4.0)).shape[0]))


def fails_in_a_scan(module: Any, x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, row: fails(module, row), x[0], x)[0]  # type: ignore[arg-type, return-value]


def fails_in_an_operator(module: Any, x: torch.Tensor) -> torch.Tensor:
    return (x + torch.arange(4.0)) @ x


@pytest.mark.default_cases("fails_in_a_scan")
@pytest.mark.parametrize("method", [fails, fails_in_a_scan, fails_in_an_operator])
def test_a_trace_that_fails_leaves_nothing_behind(method: Callable[..., Any]) -> None:
    """JAX leaves all of it behind, for as long as the process lives, if it has a constant."""

    def find_tracers() -> dict[int, jax.core.Tracer]:
        gc.collect()
        return {id(each): each for each in gc.get_objects() if issubclass(type(each), jax.core.Tracer)}

    before = find_tracers()  # held, so that no new one has the id of an old one: a test of another file may leave some
    with pytest.raises((KeyError, TypeError)):
        program(method=method)(weights, x=x)
    assert find_tracers().keys() <= before.keys()
