"""What cannot be traced says so: what, where in the model, and what to do."""

import pytest
import torch

from comfy_tpu.bridge import TraceContext
from comfy_tpu.compiler.program import Program
from comfy_tpu.errors import InvalidValueError, MissingOperatorError, TraceError
from tests.tracing import run_traced

x = torch.arange(6.0).reshape(2, 3)


def line_of(function: object, offset: int) -> str:
    code = function.__code__  # type: ignore[attr-defined]
    return f"{code.co_filename}:{code.co_firstlineno + offset} in {code.co_name}"


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def asks_for_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.max().item()


def indexes_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 2]


def asserts(x: torch.Tensor) -> torch.Tensor:
    assert (x == 0).all()
    return x


def makes_a_size(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.sum().long())  # type: ignore[arg-type]


def writes_a_number_into_a_text(x: torch.Tensor) -> torch.Tensor:
    return x if f"{x.sum():.2f}" else -x


@pytest.mark.parametrize(
    ("model", "section"),
    [
        (branches, "tensor-condition"),
        (asserts, "tensor-condition"),
        (asks_for_a_number, "tensor-to-number"),
        (makes_a_size, "tensor-to-number"),
        (writes_a_number_into_a_text, "tensor-to-number"),
        (indexes_by_mask, "mask-indexing"),
    ],
)
def test_needing_a_value_names_the_line_and_the_section(model: object, section: str) -> None:
    with pytest.raises(TraceError, match="known only while running.*static argument, or use torch.where") as caught:
        run_traced(model, x)  # type: ignore[arg-type]
    assert line_of(model, 1) in str(caught.value)
    assert str(caught.value).endswith(f"; see docs/porting.md#{section}")


def test_an_error_of_a_model_stays_where_jax_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        for kind in type(x._elem._trace).__mro__:  # type: ignore[attr-defined]
            monkeypatch.delattr(kind, "invalidate", raising=False)
        raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        Program(torch.nn.Identity(), context=TraceContext(), method=lambda module, x: fail(x), name="fails")({}, x=x)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: torch.masked_select(x, x > 1),
        lambda x: x.repeat_interleave(x[0].long(), dim=1),
        lambda x: torch.bincount(x[0].long()),
    ],
)
def test_shapes_that_depend_on_values_are_told_apart(model: object) -> None:
    with pytest.raises(TraceError, match="shapes must be known when compiling.*porting.md#data-dependent-shape"):
        run_traced(model, x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "said", "section"),
    [
        (lambda x: torch.cuda.synchronize() or x, "torch.cuda was started", "cuda"),
        (lambda x: torch.distributed.all_reduce(x) or x, "torch.distributed was used", "distributed"),
    ],
)
def test_what_only_gpus_have_is_explained(model: object, said: str, section: str) -> None:
    with pytest.raises(TraceError, match=rf"{said} at .*test_trace_errors.py.*porting.md#{section}"):
        run_traced(model, x)  # type: ignore[arg-type]


def test_what_is_not_known_stays_what_it_is() -> None:
    with pytest.raises(KeyError, match="absent"):
        run_traced(lambda x: {}["absent"], x)


def test_a_missing_operator_names_itself_its_caller_and_the_line_to_write() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.special_airy_ai(x)

    with pytest.raises(MissingOperatorError) as caught:
        run_traced(model, x)
    text = str(caught.value)
    assert "operator aten.special_airy_ai.default is not implemented" in text
    assert line_of(model, 1) in text
    assert "`@operator(torch.ops.aten.special_airy_ai.default)`" in text
    assert "comfy_tpu/bridge/operators/" in text
    assert text.endswith("; see docs/porting.md#missing-operator")


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.randn(2, 3, device=x.device),
        lambda x: torch.rand_like(x),
        lambda x: x + torch.randn(3),
        lambda x: x + torch.randn(3, generator=torch.Generator()),
        lambda x: x + torch.zeros(3).normal_(),
        lambda x: x + torch.randperm(3),
    ],
)
def test_random_numbers_are_refused(draw: object) -> None:
    with pytest.raises(TraceError, match="random numbers were drawn at .*test_trace_errors.py.*pass them as an input"):
        run_traced(draw, x)  # type: ignore[arg-type]


def test_host_tensors_become_constants_within_reason() -> None:
    table = torch.arange(3.0)
    assert torch.equal(run_traced(lambda x: x + table, x), x + table)
    large = torch.zeros(17 * 2**20)
    with pytest.raises(
        TraceError, match=r"host tensor of 68 MiB.*test_trace_errors.py.*may have 64 MiB: pass it as an input"
    ):
        run_traced(lambda x: x.sum() + large, x)


@pytest.mark.parametrize("write", ["o[0] = x[1]", "o.copy_(x)", "o += x"])
def test_writing_traced_values_into_a_host_tensor_is_explained(write: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        o = torch.zeros(2, 3)
        exec(write, {"o": o, "x": x})
        return o

    with pytest.raises(TraceError, match=r"host tensor was written with a traced value.*device=x.device"):
        run_traced(model, x)


def test_integers_that_do_not_fit_are_refused() -> None:
    large = torch.tensor([2**40 + 7])
    with pytest.raises(InvalidValueError, match="holds 1099511627783, but devices hold int32"):
        run_traced(lambda x: x, large)
    with pytest.raises(InvalidValueError, match="holds 1099511627783, but devices hold int32"):
        run_traced(lambda x: x + large, x)


def test_a_weight_that_was_not_given_is_named_as_such() -> None:
    absent = torch.zeros(3, device="meta")
    with pytest.raises(TraceError, match=r"meta tensor of shape \(3,\) has no data.*test_trace_errors.py"):
        run_traced(lambda x: x + absent, x)


def test_moving_between_devices_is_no_move() -> None:
    assert torch.equal(run_traced(lambda x: x.cpu().to("cuda").to(torch.device("meta")) + 1, x), x + 1)


def test_type_as_converts_a_copy() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 0
        return y.type_as(torch.zeros(1, dtype=torch.bfloat16, device=x.device)), y

    low, kept = run_traced(model, x)
    assert (low.dtype, kept.dtype) == (torch.bfloat16, torch.float32)


def test_assignment_converts_to_the_target() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, dtype=torch.bfloat16)
        out[..., 0::2] = x[..., 0::2]
        out[:, 1] = x[:, 1] * 2
        return out

    assert torch.equal(run_traced(model, x), model(x))
