"""A trace leaves torch as it found it, whatever the model does, and other threads never notice it."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

from comfy_tpu.bridge import TraceContext, call_function, current_trace, trace_scope
from comfy_tpu.bridge.environment import DeviceTensor
from comfy_tpu.errors import TraceError
from tests.tracing import run_traced

HANGS = 600
"""Seconds after which a thread is not coming any more, however busy the machine is."""
x = torch.arange(6.0).reshape(2, 3)


def torch_state() -> dict[str, Any]:
    return {
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "device context": getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "shown by": warnings.showwarning,
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "filters": list(warnings.filters),
        "functional": dict(vars(torch.nn.functional)),
    }


def well_behaved(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) * 2


def raises(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("in the middle of the model")


def raises_in_an_operator(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def leaves_a_mess(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.manual_seed(1234)
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.nn.functional.gelu = None
    torch.utils._python_dispatch.TorchDispatchMode().__enter__()
    raise RuntimeError("and then it failed")


@pytest.mark.parametrize("model", [well_behaved, raises, raises_in_an_operator, leaves_a_mess])
@pytest.mark.parametrize("around", ["nothing", "a device", "a mode", "no_grad"])
def test_torch_is_as_before(model: Callable[..., Any], around: str) -> None:
    surroundings = {
        "nothing": lambda: torch.enable_grad(),
        "a device": lambda: torch.device("meta"),
        "a mode": lambda: torch.overrides.BaseTorchFunctionMode(),
        "no_grad": lambda: torch.no_grad(),
    }
    with surroundings[around]():
        before = torch_state()
        try:
            run_traced(model, x)
            assert model is well_behaved
        except (KeyError, RuntimeError, TypeError):
            assert model is not well_behaved
        assert torch_state() == before
    torch.testing.assert_close(run_traced(well_behaved, x), well_behaved(x))


def test_a_trace_inside_inference_mode_is_like_any_other() -> None:
    """ComfyUI runs every node inside one, and there `.to(dtype)` does not reach torch's modes."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.5).to(torch.long) + x.half().float()

    with torch.inference_mode():
        inside = run_traced(model, x)
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(inside, run_traced(model, x))
    torch.testing.assert_close(inside, model(x))


def test_scopes_nest() -> None:
    outer, inner = TraceContext(), TraceContext()
    with trace_scope(outer) as bridge:
        with trace_scope(inner):
            assert current_trace() is inner
        assert current_trace() is outer
        made = torch.zeros(2, device="meta") + bridge.as_torch(jax.numpy.ones(2))
        assert isinstance(made, DeviceTensor)
    with pytest.raises(TraceError, match="needs a trace scope"):
        current_trace()


def test_a_trace_is_its_threads_own() -> None:
    seen: list[type[BaseException]] = []

    def other() -> None:
        try:
            current_trace()
        except TraceError:
            seen.append(TraceError)

    with trace_scope(TraceContext()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [TraceError]


def test_another_thread_does_ordinary_torch_meanwhile() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        inside.wait(HANGS)
        linear = torch.nn.Linear(3, 3)
        y = linear(torch.randn(2, 3)).relu()
        seen.extend([y, torch.arange(3), torch.nn.functional.layer_norm(y, (3,)), *linear.parameters()])
        seen.append(len(torch.overrides._get_current_function_mode_stack()))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        inside.set()
        assert done.wait(HANGS)
        return y + 1

    result = run_traced(model, x)
    thread.join()
    assert torch.equal(result, x.relu() + 1)
    assert seen[-1] == 0
    assert all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" for tensor in seen[:-1]
    )


def test_numbers_that_another_thread_draws_meanwhile_are_not_drawn_again() -> None:
    drawn = []

    def model(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: drawn.append(torch.randn(3)))
        thread.start()
        thread.join()
        return x + 1

    run_traced(model, x)
    assert not torch.equal(torch.randn(3), drawn[0])


def test_threads_that_trace_and_compile_at_once_leave_warnings_as_they_were() -> None:
    before = (list(warnings.filters), warnings.showwarning)
    start = threading.Barrier(4)

    def work(index: int) -> None:
        start.wait()
        for size in range(1, 4):
            run_traced(lambda t: t * index, torch.ones(index, size))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (list(warnings.filters), warnings.showwarning) == before


def test_two_threads_trace_at_once() -> None:
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        results[index] = run_traced(lambda t: torch.nn.functional.layer_norm(t * index, (3,)).sum(-1), x)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(1, 5):
        torch.testing.assert_close(results[index], torch.nn.functional.layer_norm(x * index, (3,)).sum(-1))


def test_float32_products_are_not_rounded_to_bfloat16_on_tpu() -> None:
    traced = jax.jit(lambda a: call_function(lambda t: t @ t.T, (a,), context=TraceContext()))
    assert "HIGHEST" in str(jax.make_jaxpr(traced)(jax.numpy.ones((2, 3))))


@torch.library.custom_op("comfy_tpu_test::turned", mutates_args=())
def turned(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    out = x * by
    out[0].add_(1)
    return out


@torch.library.custom_op("comfy_tpu_test::turn_", mutates_args={"x"})
def turn_(x: torch.Tensor) -> None:
    x.copy_(x.flip(0))


def test_operators_that_somebody_added_to_torch_are_traced_through() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.ops.comfy_tpu_test.turned(x, by=3.0)
        torch.ops.comfy_tpu_test.turn_.default(x[1:])
        turn_(x[:, 1:])
        return x, turned(y)

    x = torch.arange(12.0).reshape(4, 3)
    expected, actual = model(x.clone()), run_traced(model, x.clone())
    assert all(map(torch.equal, actual, expected))
