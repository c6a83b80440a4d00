"""Sharding constraints written on torch tensors inside a model."""

import jax
import pytest
import torch

from comfy_tpu.bridge import TraceContext, call_function, constrain, to_device
from comfy_tpu.errors import ShardingError
from comfy_tpu.parallel.mesh import make_placement

x = torch.arange(48.0).reshape(2, 24)


def model(x: torch.Tensor) -> torch.Tensor:
    return constrain(x * 2, "dp", "sp")


def test_the_result_is_split_as_written() -> None:
    context = TraceContext(placement=make_placement("dp=2,sp=4"))
    out = jax.jit(lambda a: call_function(model, (a,), context=context))(to_device(x))
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 6)}


def test_outside_a_trace_it_does_nothing() -> None:
    assert torch.equal(model(x), x * 2)


def test_without_a_placement_it_does_nothing() -> None:
    out = jax.jit(lambda a: call_function(model, (a,), context=TraceContext()))(to_device(x))
    assert len(out.devices()) == 1


def test_an_unknown_axis_is_named() -> None:
    context = TraceContext(placement=make_placement("dp=2,sp=4"))
    with pytest.raises(ShardingError, match="unknown mesh axis 'model'; choose from dp, sp, tp"):
        jax.jit(lambda a: call_function(lambda t: constrain(t, "model"), (a,), context=context))(to_device(x))
