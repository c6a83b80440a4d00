"""8-bit weights: made while a checkpoint is read, and close to what they stand for."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.quantization import quantize_weight
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels.quantized import quantized_linear
from comfy_tpu.parallel.mesh import make_placement
from tests.covering import covering
from tests.parity import small_models
from tests.tracing import relative_error

KINDS = {"fp8": (torch.float8_e4m3fn, 0.04), "int8": (torch.int8, 0.012)}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_layer(kind):
    dtype, tolerance = KINDS[kind]
    random = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 64, generator=random) * torch.logspace(-3, 3, 15).view(3, 5, 1)
    weight = torch.randn(48, 64, generator=random) * torch.logspace(-4, 4, 48).view(48, 1)
    bias = torch.randn(48, generator=random)
    small, scale = quantize_weight(weight, dtype)
    assert small.dtype == dtype
    arrays = [jnp.asarray(t.numpy()) for t in (x, scale, bias)]
    packed = jnp.asarray(small.view(torch.int8).numpy()).view(jnp.float8_e4m3fn if kind == "fp8" else jnp.int8)
    out = np.asarray(quantized_linear(arrays[0], packed, arrays[1], None, platform="cpu"))
    expected = torch.nn.functional.linear(x.double(), weight.double()).numpy()
    # Every token and every output feature has a scale of its own, so the error is small beside each of them.
    size = x.norm(dim=-1, keepdim=True).numpy() * weight.norm(dim=1).numpy() / math.sqrt(64)
    assert np.abs((out - expected) / size).max() < 4 * tolerance
    assert np.sqrt(np.mean(np.square((out - expected) / size))) < tolerance
    # A bias of 1 rounds products of a millionth away: it is looked at alone.
    with_bias = np.asarray(quantized_linear(*arrays[:1], packed, *arrays[1:], platform="cpu"))
    assert (np.abs(with_bias - (out + bias.numpy())) <= 1e-6 * (np.abs(out) + np.abs(bias.numpy()))).all()


@every_kind
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_product_does_not_run_at_the_precision_of_the_trace_scope(kind, platform):
    small = jax.ShapeDtypeStruct((8, 16), jnp.float8_e4m3fn if kind == "fp8" else jnp.int8)
    with jax.default_matmul_precision("highest"):
        traced = jax.make_jaxpr(functools.partial(quantized_linear, platform=platform), static_argnums=3)(
            jax.ShapeDtypeStruct((4, 16), jnp.bfloat16), small, jax.ShapeDtypeStruct((8,), jnp.float32), None
        )
    (product,) = (equation for equation in traced.eqns if equation.primitive.name == "dot_general")
    assert product.params["precision"] == (jax.lax.Precision.DEFAULT,) * 2


@every_kind
def test_zeros_stay_zeros(kind):
    dtype, _ = KINDS[kind]
    small, scale = quantize_weight(torch.zeros(4, 8), dtype)
    assert not small.float().any()
    packed = jnp.zeros((4, 8), jnp.float8_e4m3fn if kind == "fp8" else jnp.int8)
    out = quantized_linear(jnp.zeros((2, 8)), packed, jnp.asarray(scale.numpy()), None, platform="cpu")
    assert not np.asarray(out).any()


def transformer(kind, mesh):
    model = small_models.transformer()
    return Component(model.spec, model.config, make_placement(mesh), dtype=torch.float32, quantize=kind)


@pytest.mark.default_cases("int8-dp=2,tp=4")
@covering(
    "kind, mesh",
    KINDS,
    ["single", "dp=2,tp=4", "dp=2,sp=4"],
    strength=0,
    always=[("int8", "dp=2,tp=4"), ("fp8", "dp=2,sp=4")],  # one device by default: tests/families/test_quantized.py
)
def test_a_transformer(kind, mesh):
    model, component = small_models.transformer(), transformer(kind, mesh)
    weights = component.load(Checkpoint.open(model.checkpoint))
    small = [name for name, array in weights.items() if array.dtype.itemsize == 1]
    assert len(small) == 8
    assert all(f"{name}_scale" in weights for name in small)
    assert weights["blocks.*.attn2.to_k.weight"].dtype == jnp.float32
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 6, 10, generator=torch.Generator().manual_seed(3)),
        "timestep": torch.tensor([5, 900]),
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(4)),
    }
    (out,) = to_host(component.program(static=("return_dict",))(weights, **inputs, return_dict=False))
    expected = model.reference(**inputs, return_dict=False)[0]
    assert 1e-4 < relative_error(out, expected) < 2 * KINDS[kind][1]


def test_none_changes_nothing():
    plain = {slot.name: slot.dtype for slot in transformer("none", "single").slots}
    quantized = {slot.name for slot in transformer("fp8", "single").slots if not slot.name.endswith("_scale")}
    assert set(plain) == quantized
    assert set(map(str, plain.values())) == {"float32"}


def test_an_unknown_kind():
    with pytest.raises(InvalidValueError, match="quantize='fp4' is unknown; choose from none, fp8, int8"):
        transformer("fp4", "single")
