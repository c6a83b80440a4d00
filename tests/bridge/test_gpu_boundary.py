"""Tensors that are on a GPU already, as ComfyUI's are."""

import pytest
import torch

from comfy_tpu.bridge import to_device, to_host
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
