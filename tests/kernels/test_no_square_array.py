"""No array of queries × keys, for any kind of call, before or after division among devices."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from comfy_tpu.config import AttentionConfig, MeshSizes, Platform
from comfy_tpu.kernels import attention
from comfy_tpu.parallel.placement import Placement
from tests.covering import covering
from tests.kernels.attention_reference import absent_placement

LENGTH = 20_011  # prime: nothing divides it, and 4 shares of it are still longer than dense_max_tokens


def jaxprs_in(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from jaxprs_in(item)


def array_sizes(jaxpr: Jaxpr) -> Iterator[int]:
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            yield math.prod(getattr(variable.aval, "shape", ()))
        for inner in (inner for value in equation.params.values() for inner in jaxprs_in(value)):
            yield from array_sizes(inner)


def hlo_sizes(text: str) -> Iterator[int]:
    for shape in re.findall(r"tensor<((?:\d+x)+)[a-z]", text):
        yield math.prod(int(side) for side in shape.rstrip("x").split("x"))


def largest(placement: Placement | None, platforms: list[str], config: AttentionConfig, **options: Any) -> int:
    """Elements of the largest array of a call with one narrow head, in its jaxpr and in its StableHLO."""
    query = jax.ShapeDtypeStruct((1, options.pop("heads", 1), LENGTH, 8), jnp.bfloat16)
    arrays = {name: options.pop(name) for name in ("mask", "kv_lengths") if name in options}

    def call(query: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        return attention(query, query, query, placement=placement, config=config, **arrays, **options)

    traced = jax.jit(call).trace(query, arrays)
    text = traced.lower(lowering_platforms=tuple(platforms)).as_text()
    return max(*array_sizes(traced.jaxpr.jaxpr), *hlo_sizes(text))


KEY_MASK = jax.ShapeDtypeStruct((1, 1, 1, LENGTH), jnp.bool_)
LENGTHS = jax.ShapeDtypeStruct((1,), jnp.int32)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (100, 100)},
    "key padding": {"mask": KEY_MASK},
    "lengths": {"kv_lengths": LENGTHS},
}


@pytest.mark.default_cases(
    "cpu-full",
    "cpu-causal",
    "cpu-window",
    "cpu-key padding",
    "cpu-lengths",
    "tpu-full",
    "tpu-window",
    "tpu-key padding",
    "gpu-full",
    "gpu-causal",
    "gpu-window",
    "gpu-key padding",
    "gpu-lengths",
)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_one_device(platform: Platform, options: dict[str, Any]) -> None:
    placement = absent_placement(platform, "v6e" if platform == "tpu" else platform)
    lowering = ["cuda" if platform == "gpu" else platform]
    assert largest(placement, lowering, AttentionConfig(), **options) < LENGTH * LENGTH // 2


@covering("platform, strategy, call", ["cpu", "tpu"], ["ulysses", "ring"], ["causal", "key padding"])
def test_sequence_parallel(platform: Platform, strategy: str, call: str) -> None:
    """Inside the mesh an array is one device's share: not even a share × a share may be made."""
    sizes = MeshSizes(sp=4)
    placement = absent_placement(platform, "v6e", sp=sizes.sp)
    config = AttentionConfig(sequence_parallel=strategy)
    share = -(-LENGTH // sizes.sp)
    assert largest(placement, [platform], config, heads=4, **CALLS[call]) < share * share


def test_a_dense_mask_is_sliced_not_copied() -> None:
    """The caller's mask is queries × keys; nothing else is."""
    mask = jax.ShapeDtypeStruct((1, 1, LENGTH, LENGTH), jnp.bool_)
    query = jax.ShapeDtypeStruct((1, 1, LENGTH, 8), jnp.bfloat16)
    placement = absent_placement("tpu", "v6e")

    def call(query: jax.Array, mask: jax.Array) -> jax.Array:
        return attention(query, query, query, mask=mask, placement=placement, config=AttentionConfig())

    jaxpr = jax.make_jaxpr(call)(query, mask).jaxpr
    outputs = [variable.aval for equation in jaxpr.eqns for variable in equation.outvars]
    assert all(math.prod(aval.shape) < LENGTH * LENGTH for aval in outputs)


def test_the_check_sees_a_square_array() -> None:
    """With the limit raised, the dense score array is made, and found: both walks can fail."""
    config = AttentionConfig(dense_max_tokens=LENGTH)
    assert largest(None, ["cpu"], config) >= LENGTH * LENGTH
