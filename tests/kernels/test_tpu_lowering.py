"""Programs for TPUs, exported on a machine that has none."""

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

from comfy_tpu.config import AttentionConfig
from comfy_tpu.kernels import attention
from comfy_tpu.parallel.placement import Placement
from tests.kernels.attention_reference import absent_placement

TOKENS = 75_600  # Wan 2.1, 720p, 81 frames


def exported(placement: Placement, heads: int, **options: Any) -> str:
    sharding = placement.sharding("dp", "tp", "sp")
    array = jax.ShapeDtypeStruct((placement.sizes.dp, heads, TOKENS, 128), jnp.bfloat16, sharding=sharding)

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, placement=placement, config=AttentionConfig(), **options)

    program = jax.export.export(jax.jit(call), platforms=["tpu"])(array, array, array)
    assert program.platforms == ("tpu",)
    assert program.nr_devices == placement.sizes.device_count
    return program.mlir_module()


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (4096, 4096)}], ids=["full", "causal", "window"]
)
def test_splash_on_one_chip(options: dict[str, Any]) -> None:
    text = exported(absent_placement("tpu", "v6e"), 10, **options)
    assert text.count("tpu_custom_call") == 1
    assert f"{TOKENS}x{TOKENS}" not in text


def test_scores_cost_one_base_2_exponent_each() -> None:
    query = jax.ShapeDtypeStruct((1, 1, TOKENS, 128), jnp.bfloat16)
    placement = absent_placement("tpu", "v6e")
    text = str(jax.make_jaxpr(lambda q: attention(q, q, q, placement=placement, config=AttentionConfig()))(query))
    assert "= exp2 " in text
    assert "= exp " not in text


def test_ulysses_around_splash_on_eight_chips() -> None:
    text = exported(absent_placement("tpu", "v6e", dp=2, sp=4), 40)
    assert text.count("tpu_custom_call") == 1
    assert text.count("stablehlo.all_to_all") == 4
    assert "1x10x75600x128" in text, "the kernel's share: one CFG branch, a quarter of the heads, all tokens"
    assert f"{TOKENS}x{TOKENS}" not in text


def test_ring_of_splash_where_heads_do_not_divide() -> None:
    text = exported(absent_placement("tpu", "v6e", dp=1, sp=8), 12)
    assert text.count("tpu_custom_call") == 2, "one in the loop, one for the last share"
    assert "collective_permute" in text


def test_wan_cross_attention_makes_no_scores() -> None:
    placement = absent_placement("tpu", "v6e", dp=2, sp=4)
    query = jax.ShapeDtypeStruct((2, 40, TOKENS, 128), jnp.bfloat16, sharding=placement.sharding("dp", None, "sp"))
    text = jax.ShapeDtypeStruct((2, 40, 512, 128), jnp.bfloat16, sharding=placement.sharding("dp"))

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, placement=placement, config=AttentionConfig())

    module = jax.export.export(jax.jit(call), platforms=["tpu"])(query, text, text).mlir_module()
    assert module.count("tpu_custom_call") == 1
    assert not re.search(r"x\d{5,}x512xf32|x512x\d{5,}xf32", module), "scores of queries by keys"
    assert not any(name in module for name in ("all_to_all", "collective_permute", "all_gather"))
