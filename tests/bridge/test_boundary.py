"""Host tensors in, host tensors out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from comfy_tpu.bridge import TraceContext, check_host_data, to_device, to_host, trace_scope
from comfy_tpu.errors import EscapeError

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("consume", [False, True])
def test_round_trip(dtype: torch.dtype, consume: bool) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.0], [0.5, 100.0, 3.0]]).abs().to(dtype)
    for original in (tensor, tensor.T, tensor[:, :0], tensor[0, 0]):
        back = to_host(to_device(original), consume=consume)
        assert back.dtype == dtype
        assert back.device.type == "cpu"
        assert torch.equal(back.float(), original.float())


def test_bf16_bits_are_kept() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensor = bits.view(torch.bfloat16)  # NaNs and denormals too
    assert torch.equal(to_host(to_device(tensor)).view(torch.int16), bits)


def test_nested_structures() -> None:
    tree = {"a": [torch.ones(2), (np.zeros(3, np.float32), "text")], "b": None, "c": 3}
    back = to_host(to_device(tree))
    assert back["a"][1][1] == "text"
    assert (back["b"], back["c"]) == (None, 3)
    assert torch.equal(back["a"][0], torch.ones(2))
    assert isinstance(back["a"][1][0], torch.Tensor)


def test_later_writes_to_a_tensor_do_not_reach_the_device() -> None:
    tensor = torch.zeros(1024, 1024)
    array = to_device(tensor)
    tensor.fill_(1)
    assert float(array.sum()) == 0


def test_results_are_writable_and_their_own() -> None:
    array = jnp.zeros((1000, 1000), jnp.bfloat16)
    tensor = to_host(array)
    tensor.fill_(1)
    assert float(array.sum()) == 0


def test_consumed_memory_is_taken_over_without_a_copy() -> None:
    array = jnp.zeros((1000, 1000))
    assert to_host(array, consume=True).data_ptr() == array.unsafe_buffer_pointer()


def test_sharded_arrays_come_back_whole() -> None:
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    tensor = torch.arange(48.0).reshape(16, 3)
    array = to_device(tensor, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("sp")))
    assert len(array.devices()) == 8
    assert torch.equal(to_host(array, consume=True), tensor)


@dataclasses.dataclass
class Output:
    sample: object


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda leaf: leaf, r"result is a"),
        (lambda leaf: {"samples": [torch.ones(1), leaf]}, r"result\['samples'\]\[1\] is a"),
        (lambda leaf: (Output(leaf),), r"result\[0\].sample is a"),
    ],
)
def test_nothing_of_the_device_escapes(wrap: object, where: str) -> None:
    with trace_scope(TraceContext()) as bridge:
        inside = bridge.as_torch(jnp.ones(2))
        view = inside[:1]
    for leaf in (inside, view, jnp.ones(2), torch.nn.Linear(1, 1), torch.ones(1, device="meta")):
        with pytest.raises(EscapeError, match=where):
            check_host_data(wrap(leaf))  # type: ignore[operator]
    check_host_data(wrap(torch.ones(2)))  # type: ignore[operator]
