"""Queries and keys in 8 bits, against attention without."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.config import AttentionConfig
from comfy_tpu.kernels.int8_scores import center_keys, quantize_blocks
from comfy_tpu.parallel.mesh import make_placement
from tests.kernels.attention_reference import Case, relative_error, run

INT8 = AttentionConfig(implementation="int8", int8_min_tokens=1)
CASE = Case(queries=130, keys=400, head_dim=64, value_dim=64)


def outputs(case: Case, config: AttentionConfig, mesh: str = "single") -> np.ndarray:
    return np.asarray(run(case, config, make_placement(mesh, platform="cpu"), dtype=jnp.float32)[0])


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (CASE, 2e-2),
        (dataclasses.replace(CASE, heads=8, kv_heads=2), 2e-2),
        (dataclasses.replace(CASE, scale=0.5), 6e-2),  # four times the usual one, and so is the error
        (Case(queries=3, keys=5), 2e-2),
    ],
    ids=["plain", "gqa", "sharper", "one block"],
)
def test_is_near_attention_without(case: Case, tolerance: float) -> None:
    placement = make_placement("single", platform="cpu")
    error = relative_error(*run(case, INT8, placement, dtype=jnp.float32))
    assert 1e-4 <= error <= tolerance  # not the same: the 8 bits were there


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("sp=4", "tp=4")), "dp=2,sp=4"]
)
def test_meshes_give_the_same(mesh: str) -> None:
    case = dataclasses.replace(CASE, queries=400, keys=400)
    one, several = outputs(case, INT8), outputs(case, INT8, mesh)
    # Blocks of queries begin where a device's share does, so that another number rounds.
    assert np.linalg.norm(several - one) <= 1e-2 * np.linalg.norm(one)


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(CASE, lengths=(300, 7)),
        pytest.param(dataclasses.replace(CASE, mask=(2, 1, 1, 400)), marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(CASE, keys=130, is_causal=True), marks=pytest.mark.slow),
        dataclasses.replace(CASE, window=(40, 9)),
    ],
    ids=["lengths", "mask", "causal", "window"],
)
def test_hidden_keys_are_left_as_they_are(case: Case) -> None:
    np.testing.assert_array_equal(outputs(case, INT8), outputs(case, AttentionConfig()))


def test_short_sequences_are_left_as_they_are() -> None:
    short = dataclasses.replace(INT8, int8_min_tokens=131)
    np.testing.assert_array_equal(outputs(CASE, short), outputs(CASE, AttentionConfig()))


def test_a_ring_is_left_as_it_is() -> None:
    case = dataclasses.replace(CASE, queries=400, keys=400)
    ring = AttentionConfig(sequence_parallel="ring")
    eight_bits = dataclasses.replace(INT8, sequence_parallel="ring")
    np.testing.assert_array_equal(outputs(case, eight_bits, "sp=4"), outputs(case, ring, "sp=4"))


def test_blocks_hold_what_they_were_made_of() -> None:
    array = jnp.asarray(np.random.default_rng(0).standard_normal((2, 150, 3, 16), np.float32))
    array = array.at[:, 70:].multiply(1000.0).at[1, :64, 2].set(0.0)  # blocks of very different sizes, and an empty one
    blocks = quantize_blocks(array, 64)
    assert blocks.numbers.dtype == jnp.int8
    assert blocks.scales.shape == (2, 3, 3)
    steps = jnp.repeat(blocks.scales.swapaxes(1, 2), 64, axis=1)[:, :150, :, None]
    assert bool(jnp.all(jnp.abs(blocks.values() - array) <= 0.501 * steps))


def test_what_all_keys_have_in_common_costs_nothing() -> None:
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((1, 200, 2, 16), np.float32))
    scales = [quantize_blocks(center_keys(keys + offset), 192).scales for offset in (0.0, 100.0)]
    np.testing.assert_allclose(*scales, rtol=1e-3)
