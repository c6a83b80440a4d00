"""Writing through views: what a traced model sees is what torch sees, for every way to alias a tensor."""

import gc
import random
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import TraceContext, call_function
from comfy_tpu.errors import TraceError
from tests.tracing import run_traced

Case = Callable[[torch.Tensor, torch.Tensor], Any]


def add_into_slice(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[:, :2] += True
    return x


def add_into_last(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[..., 0].add_(y[0, 0, 0])
    return x


def assign_into_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.view(-1)[2:5] = 0
    return x


def assign_every_other(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[..., 1::2] = y[..., ::2]
    x[:, ::2, 1::3].copy_(y[:, ::2, :1])
    return x


def narrow(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = x.narrow(1, 0, 2)
    h.mul_(2)
    return x, h


def chunks(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.chunk(2, 2)
    a.add_(b)
    return x, a, b


def splits(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.split(2, 1)
    b.sub_(1)
    c, d = x.split([1, 3], 2)
    d.copy_(y[..., 1:])
    return x, a, b, c, d


def tensor_splits(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b, c = torch.tensor_split(x, 3, 2)
    b.zero_()
    d, e = x.tensor_split((1,), 1)
    e.add_(True)
    return x, a, b, c, d, e


def masked_fill_permuted(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.permute(0, 2, 1).masked_fill_((y > 1).permute(0, 2, 1), 0)
    return x


def out_into_row(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch.add(y[0], y[1], out=x[0])
    return x


def out_of_operators_without_one_of_ours(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch.maximum(y[0], y[1], out=x[0])
    torch.cat([y[:1], y[:1]], out=x)
    torch.sum(y, 0, out=x[1])
    return x


def unbound(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.unbind(0)[1].zero_()
    first, second = x
    first += y[0]
    return x, first, second


def transposed_copy(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[0].T.copy_(y[1].T)
    x.mT.copy_(y.mT)
    x.movedim(0, 2).swapaxes(0, 1)[1].zero_()
    return x


def squeezed(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.unsqueeze(1).squeeze(1).unsqueeze(-1)[0].add_(True)
    x[:1].squeeze().logical_not_()
    return x


def views_of_views(x: torch.Tensor, y: torch.Tensor) -> Any:
    a = x.transpose(1, 2)[:, 1:3]
    b = a.unflatten(2, (-1, 1))[..., 0].select(0, 1)
    b.copy_(y[1].T[1:3])
    a[0, 0] = 0
    return x, a, b


def sibling_after_write(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x[0], x.transpose(0, 1)[1:]
    x.zero_()
    a += y[1]
    return x, a, b


def base_written_old_view_read(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows, flat = x.unbind(1), x.view(-1)
    x.copy_(y)
    return rows[1] | rows[1] if x.dtype == torch.bool else rows[1] + 1, flat


def read_before_and_after(x: torch.Tensor, y: torch.Tensor) -> Any:
    view = x.view(2, -1)
    before = view + 0
    x[1] = y[0]
    return before, view


def reshaped(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.reshape(-1)[3:6] = 1
    x.flatten(1).add_(True)
    x.reshape(2, 2, -1)[0].zero_()
    return x


def reshape_that_copies(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = x.transpose(1, 2).reshape(2, -1)
    h.zero_()
    z = x.transpose(1, 2).flatten(1)
    z += True
    k = x[:, :2].reshape(-1)
    k.zero_()
    return x, h, z, k


def reshape_that_need_not_copy(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.transpose(0, 1).reshape(3, 2, 2, 2)[1].zero_()
    x[:, 1:].reshape(2, -1).add_(True)
    return x


def contiguous(x: torch.Tensor, y: torch.Tensor) -> Any:
    a = x.contiguous()
    a[0] = 0
    b = x.transpose(1, 2).contiguous()
    b[1] = 0
    return x, a, b


def contiguous_of_what_was_computed(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = torch.maximum(x.transpose(1, 2), y.transpose(1, 2))
    a = h.contiguous()
    a.zero_()
    b = h.transpose(1, 2).contiguous()
    b[0] = 0
    return x, h, a, b


def conversions(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.to(x.dtype)[0] = 0
    x.type_as(y)[:, 1] += True
    x.to("cpu").to(torch.float32).to(x.dtype, copy=True).zero_()
    x.to(torch.float16).zero_()
    return x


def copies_are_copies(x: torch.Tensor, y: torch.Tensor) -> Any:
    for copy in (x.clone(), x + 0, x.repeat(1, 1, 1), torch.cat([x]), x[:, [0, 1, 2]], x[torch.tensor([0, 1])]):
        copy.zero_()
    return x


def dropout_is_its_input(x: torch.Tensor, y: torch.Tensor) -> Any:
    F.dropout(x, training=False)[0] = 1
    return x


def detached(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.detach()[0] = 1
    x.data[1] += True
    return x


def expanded(x: torch.Tensor, y: torch.Tensor) -> Any:
    wide = x[:1].expand(4, -1, -1)
    x.add_(True)
    x.expand(2, 3, 4)[1].zero_()
    return x, wide


def diagonals(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.diagonal(0, 1, 2).copy_(y[:, :, 0])
    x[0].diagonal(1).zero_()
    return x


def broadcast_copy(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.copy_(y[0])
    x[1].copy_(y[0, 0])
    return x


def indexed(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = x.transpose(0, 1)
    h[torch.tensor([0, 2], device=x.device)] = y.transpose(0, 1)[:2]
    h[1, None, ..., -1] = 1
    h.index_fill_(0, torch.tensor([1], device=x.device), 0)
    return x, h


def whole(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[:] = y
    x[...] += y
    x[0][1][2] = 1
    return x


def nothing(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[2:] = 0
    x[:, 3:].zero_()
    x[:0, ::2] += True
    return x


def in_place_methods(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = x.transpose(1, 2)
    h.fill_(1)
    h[0].masked_fill_(y[0].T > 1, 0)
    h[1].copy_(y[1].T).abs_().neg_()
    h.scatter_(0, torch.zeros(1, 4, 3, dtype=torch.int64, device=x.device), y[:1].transpose(1, 2))
    return x


def in_place_shapes(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = x[0]
    h.unsqueeze_(0)
    h += y[:1]
    sizes = h.size(0), h.dim(), tuple(h.shape)
    h.squeeze_(0).t_()
    h.add_(True)
    return x, h, torch.tensor([sizes[0], sizes[1], *sizes[2], h.size(0)])


def data_is_replaced(x: torch.Tensor, y: torch.Tensor) -> Any:
    view = x[0]
    x.data = y
    x.add_(True)
    return x, y, view


CASES: list[Case] = [value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__]
ALL_DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.bool]
NOT_OF_BOOL = {narrow, splits, in_place_methods}
"""torch itself has no such operators for it."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        # By default every case in one dtype, and every dtype in a quarter of the cases.
        pytest.param(
            case, dtype, id=f"{case.__name__}-{dtype}", marks=[pytest.mark.slow] if (number + place) % 4 else []
        )
        for number, case in enumerate(CASES)
        for place, dtype in enumerate(ALL_DTYPES)
        if dtype != torch.bool or case not in NOT_OF_BOOL
    ],
)
def test_writes_reach_what_torch_says_they_reach(case: Case, dtype: torch.dtype) -> None:
    x, y = (torch.arange(24).reshape(2, 3, 4) + start for start in (0, 30))
    tensors = (x % 5, y % 7) if dtype != torch.bool else (x % 2, y % 3 % 2)
    expected = case(*(tensor.to(dtype) for tensor in tensors))
    actual = run_traced(case, *(tensor.to(dtype) for tensor in tensors))
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other.to(one.dtype))  # int64 is int32 on devices


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_values_are_moved_not_computed_with(value: float) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.transpose(0, 1)[::2] = 1
        x.diagonal()[1:].zero_()
        return x

    x = torch.full((4, 5), value)
    expected = model(x.clone())
    assert torch.equal(run_traced(model, x).view(torch.int32), expected.view(torch.int32))


def random_step(draw: random.Random, tensor: torch.Tensor) -> Any:
    """A view of a tensor, something computed of it, or a write into it: the tensors that come of it."""
    dim, other = draw.randrange(tensor.ndim), draw.randrange(tensor.ndim)
    start, step = draw.randrange(tensor.shape[dim]), draw.randrange(1, 3)
    order = draw.sample(range(tensor.ndim), tensor.ndim)
    merge = draw.random() < 0.5
    steps: list[Callable[[], Any]] = [
        lambda: [tensor[(slice(None),) * dim + (slice(start, None, step),)]],
        lambda: [tensor.select(dim, start)],
        lambda: [tensor.permute(order)],
        lambda: [tensor.transpose(dim, other)],
        lambda: [tensor.reshape(-1) if merge else tensor.flatten(dim, max(dim, other))],
        lambda: tensor.split(max(start, 1), dim),
        lambda: tensor.chunk(2, dim),
        lambda: tensor.unbind(dim),
        lambda: [tensor.unsqueeze(dim)],
        lambda: [tensor.squeeze()],
        lambda: [tensor.contiguous()],
        lambda: [tensor.clone()],
        lambda: [tensor + tensor],
        lambda: [-tensor],
        lambda: [tensor.to(torch.float32)],
        lambda: [tensor.unsqueeze(0).expand(2, *tensor.shape)[1]],
        lambda: [tensor.view(tensor.shape)],
        lambda: [tensor.add_(1)],
        lambda: [tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape))],
        lambda: tensor.__setitem__((slice(start, None, step),), 7),
        lambda: [tensor.masked_fill_(tensor > 5, 3)],
        lambda: [torch.mul(tensor, 2, out=tensor)],
    ]
    return draw.choice(steps)() or ()


def random_program(seed: int) -> Case:
    """Views of views of two tensors, arithmetic on them and writes into them, in any order. Ends with all of them."""

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        draw = random.Random(seed)
        tensors, results = [x, y], []
        for _ in range(14):
            tensor = draw.choice(tensors)
            if tensor.ndim:
                tensors = [*tensors, *random_step(draw, tensor)][-12:]
                results.append(draw.choice(tensors) + 0)
        return tuple(results + tensors)

    return model


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 40))])
def test_random_programs(seed: int) -> None:
    model = random_program(seed)
    expected = model(*(torch.arange(24.0).reshape(2, 3, 4) + start for start in (0, 30)))
    actual = run_traced(model, *(torch.arange(24.0).reshape(2, 3, 4) + start for start in (0, 30)))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def attend(x: torch.Tensor) -> torch.Tensor:
    """Something of which no one can say what strides it has."""
    return F.scaled_dot_product_attention(x, x, x)


def test_a_copy_or_a_view_nobody_knows_is_refused_where_it_matters() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)

    def writes_only_what_it_goes_on_with(x: torch.Tensor) -> torch.Tensor:
        h = attend(x).transpose(1, 2).reshape(1, 3, 8)
        h += 1
        return h.contiguous().mul_(2)

    expected = writes_only_what_it_goes_on_with(x)
    assert torch.allclose(run_traced(writes_only_what_it_goes_on_with, x), expected, atol=1e-5)

    def reads_what_it_may_have_written(x: torch.Tensor) -> torch.Tensor:
        h = attend(x)
        h.transpose(1, 2).reshape(1, 3, 8).zero_()
        return h

    with pytest.raises(TraceError, match=r"reshape at .*test_views.py:\d+ in reads_what.*strides.*write .clone\(\)"):
        run_traced(reads_what_it_may_have_written, x)

    def reads_a_copy_of_what_was_written(x: torch.Tensor) -> torch.Tensor:
        h = attend(x)
        copy = h.contiguous()
        h.add_(1)
        return copy

    with pytest.raises(TraceError, match=r"contiguous at .*the other is read at .*\.view\(\) if it is not"):
        run_traced(reads_a_copy_of_what_was_written, x)


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda x: x[:, :1].expand(2, 3, 4).zero_(), r"\(2, 1, 4\), expanded to \(2, 3, 4\), was written to.*clone"),
        (lambda x: x.unfold(2, 3, 1).zero_(), r"shape \(2, 3, 2, 3\) of 24 elements was written to.*clone"),
        (lambda x: x.transpose(0, 1).as_strided((2,), (1,)), r"as_strided of a view at .*use views and slices"),
        (lambda x: torch.add(x, 1, out=x[0]), r"out= has shape \(3, 4\), and the result \(2, 3, 4\)"),
        (lambda x: x.copy_(x[:, :2]), r"shape \(2, 2, 4\) was written into a tensor of shape \(2, 3, 4\)"),
    ],
)
def test_writes_that_have_no_meaning_are_refused(write: Callable[..., Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        run_traced(write, torch.zeros(2, 3, 4))


def test_out_takes_the_shape_of_the_result_if_it_was_empty() -> None:
    def model(x: torch.Tensor) -> Any:
        out = torch.empty(0, device=x.device)
        torch.add(x, 1, out=out)
        return out, torch.tensor(out.size())

    x = torch.zeros(2, 3)
    assert all(map(torch.equal, run_traced(model, x), (one.to(torch.int32) + 0.0 for one in model(x))))


def test_an_integer_known_only_while_running_selects_a_view() -> None:
    def model(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x[at].add_(1)
        x[:, at] += 2
        x[at, at] = 0
        return x

    x, at = torch.arange(16.0).reshape(4, 4), torch.tensor(2)
    assert torch.equal(run_traced(model, x.clone(), at), model(x.clone(), at))


def test_complex_numbers_as_pairs() -> None:
    def model(x: torch.Tensor) -> Any:
        pairs = torch.view_as_complex(x)
        pairs[0] = pairs[1] * 2
        torch.view_as_real(pairs)[2, 1] = 5
        return x, torch.view_as_real(pairs).sum(0)

    x = torch.arange(12.0).reshape(3, 2, 2)
    assert all(map(torch.equal, run_traced(model, x.clone()), model(x.clone())))


def lowered(function: Callable[..., Any], *arrays: jax.Array) -> str:
    def model(*arrays: jax.Array) -> Any:
        return function(*arrays)

    return jax.jit(model).lower(*arrays).as_text()


def test_views_that_nobody_writes_to_cost_nothing() -> None:
    def in_torch(x: torch.Tensor, w: torch.Tensor) -> Any:
        a, b = F.linear(x, w).chunk(2, -1)
        a = a.unflatten(-1, (2, 2)).transpose(1, 2)
        b = b.view(2, 3, 2, 2).permute(0, 2, 1, 3)
        h = a * b
        return h[:, 1], h.transpose(1, 2).reshape(2, 3, -1).contiguous(), a[:, 0]

    def in_jax(x: jax.Array, w: jax.Array) -> Any:
        y = jnp.einsum("...a,ba->...b", x, w, precision="highest")
        a, b = y[..., :4], y[..., 4:8]
        a = a.reshape(2, 3, 2, 2).transpose(0, 2, 1, 3)
        h = a * b.reshape(2, 3, 2, 2).transpose(0, 2, 1, 3)
        return h[:, 1], h.transpose(0, 2, 1, 3).reshape(2, 3, 4), a[:, 0]

    x, w = jnp.zeros((2, 3, 5)), jnp.zeros((8, 5))
    traced = lowered(lambda *arrays: call_function(in_torch, arrays, context=TraceContext()), x, w)
    by_hand = lowered(in_jax, x, w)
    assert Counter(re.findall(r"stablehlo\.\w+", traced)) == Counter(re.findall(r"stablehlo\.\w+", by_hand))


def test_writes_are_no_scatters() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, 1:].add_(1)
        x[..., 0::2] = y[..., 1::2]
        x.transpose(0, 1)[0].mul_(y[:, 0])
        return x

    x = jnp.zeros((2, 3, 4))
    text = lowered(lambda *arrays: call_function(model, arrays, context=TraceContext()), x, x)
    assert "scatter" not in text


def test_a_slice_written_with_what_was_read_from_it() -> None:
    """As a RoPE over a part of the sequence is. XLA for CPUs wrote such a slice in place before it was read."""

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, :, 1:] = x[:, :, 1:].flip(-1) * y
        return x.reshape(2, 3, 40)

    x, y = torch.randn(1, 2, 3, 40), torch.randn(2, 40)
    torch.testing.assert_close(run_traced(model, x.clone(), y), model(x.clone(), y))


def test_nothing_is_kept_alive() -> None:
    kept: list[weakref.ref[Any]] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        view = x.transpose(0, 1)[1:]
        attended = attend(x).contiguous()
        view.add_(1)
        kept.extend(weakref.ref(tensor) for tensor in (view, attended))
        kept.extend(weakref.ref(tensor._memory) for tensor in (view, attended))  # type: ignore[attr-defined]
        return x + attended

    gc.disable()  # by counting references alone
    try:
        run_traced(model, torch.zeros(2, 3, 4))
    finally:
        gc.enable()
    assert kept
    assert not any(reference() for reference in kept)
