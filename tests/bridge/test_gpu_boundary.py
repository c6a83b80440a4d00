"""Tensors that are on a GPU already, as ComfyUI's are."""

import jax
import pytest
import torch

from comfy_tpu.bridge import GpuHandover, to_device, to_host
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement

pytestmark = pytest.mark.gpu


@pytest.fixture
def placement() -> Placement:
    try:
        return make_placement("single", platform="gpu")
    except MeshError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_copy_of_a_tensor_on_the_gpu(dtype: torch.dtype, placement: Placement) -> None:
    tensor = torch.arange(24, device="cuda").reshape(4, 6).T.to(dtype)
    expected = tensor.cpu()
    array = to_device(tensor, placement.sharding())
    tensor.zero_()
    assert torch.equal(to_host(array).to(dtype), expected)


def test_results_that_go_on_in_torch_before_they_are_computed(placement: Placement) -> None:
    """Ten steps, each from the result of the one before, in memory that both libraries use again at once."""

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 50, lambda _, y: y @ y / jax.numpy.linalg.norm(y), x)

    handover, device = GpuHandover(), torch.device("cuda")
    first = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0))

    def run(*, waits: bool) -> torch.Tensor:
        x = first.to(device)
        for _ in range(10):
            inputs = to_device(x, placement.sharding())
            results = step(inputs)
            assert handover.is_for(results, device)
            made = to_host(results).to(device) if waits else handover.take(results, device, inputs)
            x = made * 2 - 0.001
            del inputs, results
            torch.full_like(x, float("nan"))  # into whatever memory is free
        return x.cpu()

    assert torch.equal(run(waits=False), run(waits=True))


def test_results_elsewhere_go_over_the_host(placement: Placement) -> None:
    array = to_device(torch.ones(3), placement.sharding())
    assert not GpuHandover.is_for(array, torch.device("cpu"))
    assert not GpuHandover.is_for((array, 3), torch.device("cuda"))
