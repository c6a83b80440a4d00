"""Wan's transformer, text encoder and VAE against PyTorch, on every layout of an eight-device mesh."""

import functools
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import ShardingConfig
from comfy_tpu.parallel.mesh import make_placement
from tests.covering import covering
from tests.parity import small_models
from tests.parity.small_models import SmallModel
from tests.tracing import relative_error

LAYOUTS = ["single", "dp=2,tp=4", "tp=8", "dp=2,sp=4", "sp=8"]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
every_layout_scan_and_precision = covering("mesh, scan, dtype", LAYOUTS, [True, False], TOLERANCES, strength=1)
every_precision = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=["float32", "bfloat16"])
every_layout_and_precision = covering(
    "mesh, dtype",
    LAYOUTS,
    TOLERANCES,
    strength=0,
    always=[("dp=2,sp=4", torch.bfloat16), ("tp=8", torch.float32)],  # all divide the columns over every device
)


def run(
    model: SmallModel,
    mesh: str,
    dtype: torch.dtype,
    *,
    method: str = "forward",
    scan: bool = True,
    input_axes: Any = None,
    **inputs: Any,
) -> Any:
    # Every weight is stored in pieces, however small: it is the gathering that is on trial.
    sharding = ShardingConfig(gather_min_bytes=0)
    component = Component(model.spec, model.config, make_placement(mesh), dtype=dtype, sharding=sharding, scan=scan)
    weights = component.load(Checkpoint.open(model.checkpoint))
    static = tuple(name for name, value in inputs.items() if not isinstance(value, torch.Tensor))
    program = component.program(method, static=static, input_axes=input_axes)
    return to_host(program(weights, **inputs))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


@functools.cache
def transformer_case() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    # 3 × 3 × 5 = 45 video tokens and 7 text tokens: neither divides by anything on the mesh.
    inputs = {
        "hidden_states": random(2, 4, 3, 6, 10),
        "timestep": torch.tensor([5, 900]),
        "encoder_hidden_states": random(2, 7, 16),
    }
    return inputs, small_models.transformer().reference(**inputs, return_dict=False)[0]


@pytest.mark.default_cases(
    "single-True-dtype0", "dp=2,tp=4-False-dtype7", "dp=2,sp=4-True-dtype12", "sp=8-True-dtype16"
)
@every_layout_scan_and_precision
def test_transformer(mesh: str, scan: bool, dtype: torch.dtype) -> None:
    inputs, expected = transformer_case()
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    axes = {"hidden_states": ("dp",), "encoder_hidden_states": ("dp",), "timestep": ("dp",)}
    (actual,) = run(small_models.transformer(), mesh, dtype, scan=scan, input_axes=axes, **inputs, return_dict=False)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype]


def test_transformer_with_one_branch_on_a_mesh_for_two() -> None:
    inputs, expected = transformer_case()
    one = {name: value[1:] for name, value in inputs.items()}
    axes = {"hidden_states": ("dp",), "encoder_hidden_states": ("dp",), "timestep": ("dp",)}
    model = small_models.transformer()
    (actual,) = run(model, "dp=2,sp=4", torch.float32, input_axes=axes, **one, return_dict=False)
    assert relative_error(actual, expected[1:]) <= 1e-4


@functools.cache
def text_encoder_case() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 11:] = 0
    ids = torch.randint(0, 96, (2, 19), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs, small_models.text_encoder().reference(**inputs, return_dict=False)[0]


@pytest.mark.default_cases("dp=2,tp=4-False-dtype7", "dp=2,sp=4-True-dtype12")
@every_layout_scan_and_precision
def test_text_encoder(mesh: str, scan: bool, dtype: torch.dtype) -> None:
    inputs, expected = text_encoder_case()
    (actual,) = run(small_models.text_encoder(), mesh, dtype, scan=scan, **inputs, return_dict=False)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype]


@functools.cache
def decoded() -> tuple[torch.Tensor, torch.Tensor]:
    latents = random(1, 4, 2, 3, 7)
    return latents, small_models.vae().reference.decode(latents, return_dict=False)[0]


@pytest.mark.default_cases("dp=2,sp=4-dtype7")
@every_layout_and_precision
def test_vae_decode(mesh: str, dtype: torch.dtype) -> None:
    latents, expected = decoded()
    width = {"z": (None, None, None, None, ("dp", "sp", "tp"))}
    (actual,) = run(
        small_models.vae(), mesh, dtype, method="decode", input_axes=width, z=latents.to(dtype), return_dict=False
    )
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype]


@pytest.mark.parametrize("mesh", [pytest.param("single", marks=pytest.mark.slow), "dp=2,sp=4"])
def test_vae_encode(mesh: str) -> None:
    video = random(1, 3, 5, 12, 28).clamp(-1, 1)
    expected = small_models.vae().reference._encode(video)
    width = {"x": (None, None, None, None, ("dp", "sp", "tp"))}
    actual = run(small_models.vae(), mesh, torch.float32, method="_encode", input_axes=width, x=video)
    assert relative_error(actual, expected) <= 1e-4
