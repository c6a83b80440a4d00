"""Our Hopper kernel, lowered for a GPU on a machine that has none."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest

from comfy_tpu.config import AttentionConfig
from comfy_tpu.kernels import hopper, joint_attention
from comfy_tpu.kernels.hopper import hopper_attention
from tests.covering import covering
from tests.kernels.attention_reference import absent_placement


@pytest.mark.default_cases("sizes18-bfloat16-padding", "sizes13-float16-lengths")
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


def test_an_image_and_its_padded_text_sort_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_installed", lambda: True)
    image, text = (jax.ShapeDtypeStruct((1, 2, tokens, 128), jnp.bfloat16) for tokens in (4096, 256))
    attend = functools.partial(joint_attention, placement=absent_placement("gpu", "h200"), config=AttentionConfig())
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.make_jaxpr(attend)((image,) * 3, (text,) * 3, kv_lengths=lengths)
    assert "wgmma" in str(traced)
    assert "sort[" not in str(traced)
