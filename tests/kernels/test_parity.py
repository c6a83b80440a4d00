"""Every implementation against torch on one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.config import AttentionConfig, BlockSizes
from comfy_tpu.kernels import attention
from comfy_tpu.kernels.cudnn import cudnn_attention
from comfy_tpu.kernels.masking import Masking, make_band
from tests.kernels.attention_reference import Case, relative_error, run

# dense_max_tokens=16: every case below is "long", so that chunks and tiles are really used.
CHUNKED = AttentionConfig(implementation="chunked", dense_max_tokens=16)
DENSE = AttentionConfig(implementation="chunked")
SPLASH = AttentionConfig(implementation="splash", block_sizes=BlockSizes(query=128, key=256, key_compute=128))

CASES = {
    "defaults": Case(),
    "ragged": Case(queries=130, keys=257, value_dim=24, head_dim=40),
    "scale": Case(scale=0.3),
    "gqa": Case(kv_heads=2, keys=130),
    "mqa": Case(kv_heads=1),
    "causal": Case(is_causal=True, queries=257, keys=257),
    "causal more keys": Case(is_causal=True, queries=130, keys=300),
    "causal more queries": Case(is_causal=True, queries=300, keys=130),
    "window": Case(queries=300, keys=300, window=(20, 7)),
    "window without keys": Case(queries=400, keys=130, window=(5, 3)),
    "causal window": Case(queries=300, keys=300, window=(40, 9), is_causal=True),
    "lengths": Case(queries=77, keys=300, lengths=(300, 129)),
    "length zero": Case(lengths=(0, 5)),
    "causal lengths": Case(queries=300, keys=300, lengths=(200, 31), is_causal=True),
    "key padding": Case(keys=300, mask=(2, 1, 1, 300)),
    "key padding, lengths, window": Case(queries=130, keys=130, mask=(130,), lengths=(99, 130), window=(30, 30)),
    "float key mask": Case(keys=130, mask=(1, 1, 1, 130), mask_kind="float"),
}
DENSE_MASKS = {
    "bool mask": Case(mask=(2, 4, 77, 77)),
    "float mask": Case(queries=130, keys=257, mask=(130, 257), mask_kind="float"),
    "mask by head": Case(mask=(1, 4, 1, 77), kv_heads=2),
    "mask by row": Case(mask=(2, 1, 77, 1)),
    "mask and window": Case(mask=(2, 1, 77, 77), window=(9, 9), lengths=(77, 50)),
}


@pytest.mark.parametrize("case", [*CASES.values(), *DENSE_MASKS.values()], ids=[*CASES, *DENSE_MASKS])
@pytest.mark.parametrize("config", [CHUNKED, DENSE], ids=["chunked", "dense"])
def test_plain_jax_matches_torch(case: Case, config: AttentionConfig) -> None:
    assert relative_error(*run(case, config)) <= 1e-5


# What others hold together with something else, or `test_plain_jax_matches_torch` does: the masks are made outside.
ALONE = {"scale", "mqa", "causal", "window", "lengths", "causal more queries", "causal window", "float key mask"}


@pytest.mark.default_cases("key padding, lengths, window", "ragged", "causal lengths", "gqa", "length zero")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] if name in ALONE else []) for name, case in CASES.items()],
)
def test_splash_matches_torch(case: Case) -> None:
    assert relative_error(*run(case, SPLASH)) <= 1e-5


def test_several_chunks_match_torch() -> None:
    """Lengths over the chunk size of 1024, so that chunks are skipped, cut and started early."""
    case = Case(batch=1, heads=1, kv_heads=1, queries=1100, keys=2300, head_dim=8, value_dim=8)
    for options in ({}, {"is_causal": True}, {"window": (60, 30)}, {"lengths": (1500,)}, {"mask": (1100, 2300)}):
        assert relative_error(*run(Case(**{**case.__dict__, **options}), CHUNKED)) <= 1e-5


def test_bfloat16_of_a_convolution() -> None:
    """Channels before pixels, as in a VAE: XLA transposes the operands in their products."""
    projected = jnp.asarray(np.random.default_rng(0).standard_normal((2, 96, 96)), jnp.bfloat16)

    @jax.jit
    def attend(projected: jax.Array, gain: jax.Array) -> jax.Array:
        query, key, value = (jnp.swapaxes(x, 1, 2)[:, None] for x in jnp.split(projected * gain, 3, axis=1))
        return attention(query, key, value, placement=None, config=DENSE)

    got = attend(projected, jnp.ones((), jnp.bfloat16))
    expected = attend(projected.astype(jnp.float32), jnp.ones(()))
    assert got.dtype == jnp.bfloat16
    assert jnp.max(jnp.abs(got.astype(jnp.float32) - expected)) < 2e-2


@pytest.mark.parametrize("config", [CHUNKED, DENSE, SPLASH], ids=["chunked", "dense", "splash"])
def test_bfloat16_matches_torch(config: AttentionConfig) -> None:
    case = Case(queries=130, keys=257, kv_heads=2, lengths=(257, 200))
    assert relative_error(*run(case, config, dtype=jnp.bfloat16)) <= 2e-2


def test_block_sizes_that_do_not_divide() -> None:
    case = Case(batch=1, heads=1, kv_heads=1, queries=700, keys=900, is_causal=True)
    blocks = BlockSizes(query=256, key=512, key_compute=128)
    assert relative_error(*run(case, AttentionConfig(implementation="splash", block_sizes=blocks))) <= 1e-5


class ExtremeBias(Case):
    """The first sequence sees no key at all; the second has the same huge bias everywhere, which changes nothing."""

    def inputs(self, seed: int = 0) -> dict:
        mask = np.full((2, 1, 1, self.keys), -np.inf, np.float32)
        mask[1] = np.finfo(np.float32).min
        return {**super().inputs(seed), "mask": mask}


@pytest.mark.parametrize("config", [CHUNKED, SPLASH], ids=["chunked", "splash"])
def test_rows_without_keys_are_zero_and_huge_biases_finite(config: AttentionConfig) -> None:
    case = ExtremeBias(queries=20, keys=20, mask=(2, 1, 1, 20), mask_kind="float")
    got, _ = run(case, config)
    assert not got[0].any()
    # torch in float32: the scores vanish beside the bias, and every key weighs the same.
    np.testing.assert_allclose(
        got[1], np.broadcast_to(case.inputs()["value"][1].mean(1, keepdims=True), got[1].shape), atol=1e-5
    )


@pytest.mark.default_cases(
    "{'is_causal': True}-chunked",
    "{'is_causal': True}-splash",
    "{'window': (9, 9)}-chunked",
    "{'lengths': (100, 60)}-chunked",
    "{'lengths': (100, 60)}-splash",
)
@pytest.mark.parametrize(
    ("config", "keys", "first_poisoned"), [(CHUNKED, 3000, 1024), (SPLASH, 900, 256)], ids=["chunked", "splash"]
)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (9, 9)}, {"lengths": (100, 60)}], ids=str)
def test_blocks_out_of_sight_are_not_computed(
    config: AttentionConfig, keys: int, first_poisoned: int, options: dict[str, Any]
) -> None:
    """A NaN times a weight of zero is NaN: it stays out only if the block was never multiplied."""
    case = Case(queries=128, keys=keys, **options)
    inputs = {name: jnp.asarray(array) for name, array in case.inputs().items()}
    expected = case.expected(inputs)
    inputs["value"] = inputs["value"].at[:, :, first_poisoned:].set(jnp.nan)
    if case.lengths:
        inputs["key"] = inputs["key"].at[:, :, first_poisoned:].set(jnp.nan)
    got = jax.jit(lambda arrays: attention(**arrays, placement=None, config=config, **case.options()))(inputs)
    assert relative_error(np.asarray(got), expected) <= 1e-5


@pytest.mark.thorough  # by default: the named shapes, above
def test_random_shapes_match_torch() -> None:
    rng = np.random.default_rng(7)
    for seed in range(4):
        kv_heads = int(rng.integers(1, 4))
        queries, keys = (int(n) for n in rng.integers(1, 200, 2))
        case = Case(
            batch=2,
            heads=kv_heads * int(rng.integers(1, 4)),
            kv_heads=kv_heads,
            queries=queries,
            keys=keys,
            head_dim=int(rng.integers(1, 40)),
            value_dim=int(rng.integers(1, 40)),
            is_causal=bool(rng.integers(2)),
            window=(int(rng.integers(0, 90)), int(rng.integers(0, 90))) if rng.integers(2) else None,
            lengths=tuple(int(n) for n in rng.integers(0, keys + 1, 2)) if rng.integers(2) else None,
        )
        for config in (CHUNKED, SPLASH):
            got, expected = run(case, config, seed=seed)
            assert np.abs(got - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1.0), case


def test_no_queries_give_no_rows() -> None:
    got, _ = run(Case(queries=0, keys=5000), CHUNKED)
    assert got.shape == (2, 4, 0, 16)


CUDNN_CASES = ["ragged", "gqa", "causal more keys", "causal window", "causal lengths", "length zero", "key padding"]


@pytest.mark.parametrize("name", CUDNN_CASES)
def test_the_call_to_cudnn_means_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.nn's plain implementation in the place of cuDNN, which needs a GPU: the arguments we give it are right."""
    original = jax.nn.dot_product_attention

    def plain(*args: Any, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        return original(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    case = dataclasses.replace(CASES[name], value_dim=CASES[name].head_dim)
    inputs = {name: jnp.asarray(array) for name, array in case.inputs().items()}
    masking = Masking(
        band=make_band(case.is_causal, case.window),
        lengths=inputs.get("kv_lengths"),
        keys=inputs["mask"][:, 0, 0] if case.mask else None,
    )
    call = functools.partial(cudnn_attention, masking=masking, scale=case.head_dim**-0.5)
    got = jax.jit(call)(inputs["query"], inputs["key"], inputs["value"])
    assert relative_error(np.asarray(got), case.expected(inputs)) <= 1e-5
