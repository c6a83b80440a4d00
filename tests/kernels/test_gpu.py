"""Attention on a real GPU against torch on the CPU: cuDNN, our Hopper kernel, and what neither takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.config import AttentionConfig
from comfy_tpu.errors import MeshError
from comfy_tpu.kernels import attention, joint_attention
from comfy_tpu.kernels.choice import Call, hopper_refusal
from comfy_tpu.kernels.hopper import hopper_attention
from comfy_tpu.kernels.int8_scores import round_to_int8
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement
from tests.kernels.attention_reference import Case, relative_error, run

pytestmark = pytest.mark.gpu

CASES = {
    "plain": Case(head_dim=128, value_dim=128, queries=300, keys=300),
    "ragged long": Case(batch=1, heads=2, kv_heads=2, head_dim=128, value_dim=128, queries=4099, keys=5003),
    "gqa causal": Case(heads=8, kv_heads=2, head_dim=64, value_dim=64, queries=130, keys=130, is_causal=True),
    "causal, more keys": Case(head_dim=64, value_dim=64, queries=77, keys=130, is_causal=True),
    "left window": Case(head_dim=64, value_dim=64, queries=300, keys=300, window=(40, 0)),
    "both windows": Case(head_dim=64, value_dim=64, queries=300, keys=300, window=(40, 9)),
    "lengths": Case(head_dim=64, value_dim=64, lengths=(77, 3)),
    "no keys at all": Case(head_dim=64, value_dim=64, lengths=(0, 40)),
    "key mask": Case(head_dim=64, value_dim=64, mask=(2, 1, 1, 77)),
    "dense mask": Case(head_dim=64, value_dim=64, mask=(2, 4, 77, 77)),
    "float mask": Case(head_dim=64, value_dim=64, mask=(1, 4, 77, 77), mask_kind="float"),
    "scale": Case(head_dim=64, value_dim=64, scale=0.3),
    "odd head": Case(head_dim=12, value_dim=20),
}


@pytest.fixture(scope="module")
def placement() -> Placement:
    try:
        return make_placement("single", platform="gpu")
    except MeshError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")


@pytest.fixture(scope="module")
def hopper(placement: Placement) -> Placement:
    if hopper_refusal(Call(8, 300, 300, 128, 128, jnp.bfloat16), "gpu", placement.chip, None):
        pytest.skip(f"this kernel is for Hopper GPUs, and this one is {placement.chip}; run it on an H100 or H200")
    return placement


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 4e-3), (jnp.float32, 1e-5)], ids=["bf16", "f16", "f32"]
)
def test_matches_torch(placement: Placement, name: str, dtype: object, tolerance: float) -> None:
    assert relative_error(*run(CASES[name], AttentionConfig(), placement, dtype=dtype)) <= tolerance


HOPPER = {
    "tiles": Case(head_dim=128, value_dim=128, queries=384, keys=384),
    "ragged": Case(head_dim=128, value_dim=128, queries=1000, keys=777),
    "one tile of few keys": Case(head_dim=128, value_dim=128, queries=3, keys=5),
    "heads of 64": Case(head_dim=64, value_dim=64, queries=257, keys=4099),
    "gqa": Case(heads=8, kv_heads=2, head_dim=128, value_dim=128, queries=130, keys=200),
    "scores that need a maximum": Case(head_dim=128, value_dim=128, queries=300, keys=300, scale=8.0),
    "a scale below zero": Case(head_dim=128, value_dim=128, queries=300, keys=300, scale=-0.1),
}
HOPPER_HIDDEN = {
    "lengths": Case(head_dim=128, value_dim=128, queries=1000, keys=777, lengths=(576, 600)),
    "lengths of one tile and less": Case(head_dim=128, value_dim=128, queries=300, keys=777, lengths=(192, 3)),
    "lengths beyond the keys": Case(head_dim=64, value_dim=64, queries=257, keys=4099, lengths=(5000, 4098)),
    "no keys at all": Case(head_dim=128, value_dim=128, queries=300, keys=777, lengths=(0, 40)),
    "lengths, scores that need a maximum": Case(
        head_dim=128, value_dim=128, queries=300, keys=777, lengths=(0, 700), scale=8.0
    ),
    "key mask": Case(head_dim=128, value_dim=128, queries=300, keys=777, mask=(2, 1, 1, 777)),
    "gqa, key mask and lengths": Case(
        heads=8, kv_heads=2, head_dim=128, value_dim=128, queries=130, keys=500, mask=(2, 1, 1, 500), lengths=(333, 500)
    ),
}


@pytest.mark.parametrize("name", HOPPER | HOPPER_HIDDEN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 4e-3)], ids=["bf16", "f16"])
def test_our_hopper_kernel_matches_torch(hopper: Placement, name: str, dtype: object, tolerance: float) -> None:
    config = AttentionConfig(implementation="hopper")
    case = (HOPPER | HOPPER_HIDDEN)[name]
    assert relative_error(*run(case, config, hopper, dtype=dtype)) <= tolerance


@pytest.mark.parametrize("name", HOPPER)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 4e-3)], ids=["bf16", "f16"])
@pytest.mark.usefixtures("hopper")
def test_our_hopper_kernel_multiplies_8_bits(name: str, dtype: Any, tolerance: float) -> None:
    """What 8 bits leave of queries and keys, and the same by another kernel in float32."""
    case = HOPPER[name]
    query, key, value = (jnp.asarray(array, dtype) for array in case.inputs().values())
    scale = abs(case.scale or case.head_dim**-0.5)
    # Rounded on the GPU, too: its division may put a tie on the other side, which sharp scores would show.
    rounded = jax.jit(round_to_int8)(query.astype(jnp.float32), key.astype(jnp.float32))
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (jnp.asarray(np.asarray(array, np.float32)) for array in (*rounded, value))
        expected = attention(
            q,
            k,
            v,
            placement=None,
            config=AttentionConfig(),
            scale=scale,
            enable_gqa=case.heads != case.kv_heads,
        )
    out = jax.jit(functools.partial(hopper_attention, scale=scale, int8_scores=True))(query, key, value)
    assert relative_error(np.asarray(out, np.float32), np.asarray(expected)) <= tolerance


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_our_hopper_kernel_passes_over_blocks_of_padding(hopper: Placement, dtype: Any) -> None:
    """An image of 600 tokens and a text of 300, of which one row has 5 and the other none: blocks have 128 rows."""
    case = Case(head_dim=128, value_dim=128, queries=900, keys=900, lengths=(605, 600))
    inputs = case.inputs()
    arrays = [jnp.asarray(inputs[name], dtype) for name in ("query", "key", "value")]
    image, text = ([array[:, :, part] for array in arrays] for part in (slice(600), slice(600, None)))
    config, lengths = AttentionConfig(implementation="hopper"), jnp.array(case.lengths)
    attend = functools.partial(joint_attention, placement=hopper, config=config, kv_lengths=lengths)
    got = np.concatenate([np.asarray(part, np.float32) for part in jax.jit(attend)(image, text)], axis=2)
    expected = case.expected(dict(zip(("query", "key", "value"), arrays, strict=True)))
    for row, length in enumerate(case.lengths or ()):
        assert relative_error(got[row, :, :length], expected[row, :, :length]) <= 2e-2
        assert not got[row, :, 640:].any()
