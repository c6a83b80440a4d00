"""Sharding constraints written on torch tensors inside a model."""

import jax
import pytest
import torch

from comfy_tpu.bridge import TraceContext, call_function, constrain, to_device, to_host
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


@pytest.mark.parametrize("mesh", ["sp=4", "dp=2,sp=4"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(("size", "stride"), [((2, 4), 1), ((2, 8), 1), ((4, 4), 2), ((1, 8), 1)], ids=str)
def test_a_convolution_of_a_small_image_is_right_over_a_mesh(
    size: tuple[int, int], stride: int, rank: int, mesh: str
) -> None:
    """Behind the attention of a VAE, an image is split by tokens: by rows first."""
    torch.manual_seed(0)
    height, width = size
    tokens = torch.randn(1, 16, height * width)
    weight = torch.randn(16, 16, *(1, 3, 3)[3 - rank :])

    def convolve(tokens: torch.Tensor) -> torch.Tensor:
        image = constrain(tokens, None, None, "sp").reshape(1, 16, *(1, height, width)[3 - rank :])
        convolution = torch.nn.functional.conv3d if rank == 3 else torch.nn.functional.conv2d
        return convolution(image, weight, stride=(1, stride, stride)[3 - rank :], padding=(0, 1, 1)[3 - rank :])

    context = TraceContext(placement=make_placement(mesh))
    out = jax.jit(lambda a: call_function(convolve, (a,), context=context))(to_device(tokens))
    torch.testing.assert_close(to_host(out), convolve(tokens), rtol=1e-4, atol=1e-4)
