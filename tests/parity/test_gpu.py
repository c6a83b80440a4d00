"""Wan's components on a real GPU against PyTorch on the CPU."""

import pytest
import torch

from comfy_tpu.errors import MeshError
from comfy_tpu.parallel.mesh import make_placement
from tests.parity import small_models
from tests.parity.test_wan_components import decoded, every_precision, run, text_encoder_case, transformer_case
from tests.tracing import relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    try:
        make_placement("single", platform="gpu")
    except MeshError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")


@every_precision
def test_transformer(dtype: torch.dtype, tolerance: float) -> None:
    inputs, expected = transformer_case()
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    (actual,) = run(small_models.transformer(), "single", dtype, **inputs, return_dict=False)
    assert relative_error(actual, expected) <= tolerance


@every_precision
def test_text_encoder(dtype: torch.dtype, tolerance: float) -> None:
    inputs, expected = text_encoder_case()
    (actual,) = run(small_models.text_encoder(), "single", dtype, **inputs, return_dict=False)
    assert relative_error(actual, expected) <= tolerance


@every_precision
def test_vae_decode(dtype: torch.dtype, tolerance: float) -> None:
    latents, expected = decoded()
    (actual,) = run(small_models.vae(), "single", dtype, method="decode", z=latents.to(dtype), return_dict=False)
    assert relative_error(actual, expected) <= tolerance
