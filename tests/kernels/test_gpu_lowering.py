"""Our Hopper kernel, lowered for a GPU on a machine that has none."""

import functools

import jax
import jax.export
import jax.numpy as jnp

from comfy_tpu.kernels.hopper import hopper_attention
from tests.covering import covering


@covering(
    "sizes, dtype, form",
    [(32_760, 32_760, 128), (1000, 777, 128), (64, 100, 64)],
    [jnp.bfloat16, jnp.float16],
    ["plain", "lengths", "padding", "int8"],
    strength=1,
)
def test_lowers(sizes: tuple[int, int, int], dtype: jnp.dtype, form: str) -> None:
    queries, keys, head_dim = sizes
    query = jax.ShapeDtypeStruct((1, 4, queries, head_dim), dtype)
    key = jax.ShapeDtypeStruct((1, 2, keys, head_dim), dtype)
    attend = functools.partial(hopper_attention, scale=0.1, int8_scores=form == "int8", queries_end=form == "padding")
    more = {"lengths": jax.ShapeDtypeStruct((1,), jnp.int32)} if form in ("lengths", "padding") else {}
    exported = jax.export.export(jax.jit(attend), platforms=["cuda"])(query, key, key, **more)
    text = exported.mlir_module()
    # One kernel, which itself chooses the form by the size of the scores: the device does not wait for the host.
    assert text.count("@mosaic_gpu") == 1
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text
    assert exported.out_avals[0].shape == query.shape
    assert exported.out_avals[0].dtype == dtype
