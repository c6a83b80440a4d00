"""Attention over eight devices: every layout and both sequence-parallel variants against torch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.config import AttentionConfig, BlockSizes
from comfy_tpu.errors import MeshError
from comfy_tpu.kernels import attention, joint_attention
from tests.covering import covering
from tests.kernels.attention_reference import Case, cpu_placement, relative_error, run

LAYOUTS = {
    "dp2 tp4": {"dp": 2, "tp": 4},
    "tp8": {"tp": 8},
    "dp2 sp4": {"dp": 2, "sp": 4},
    "sp8": {"sp": 8},
    "dp2 sp2 tp2": {"dp": 2, "sp": 2, "tp": 2},
}
CHUNKED = AttentionConfig(implementation="chunked", dense_max_tokens=16)


def splash(strategy: str) -> AttentionConfig:
    blocks = BlockSizes(query=128, key=128, key_compute=128)
    return AttentionConfig(implementation="splash", block_sizes=blocks, sequence_parallel=strategy, dense_max_tokens=16)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(heads=8, kv_heads=8, queries=77, keys=77),
        Case(heads=8, kv_heads=2, queries=130, keys=77, is_causal=True, lengths=(77, 40)),
    ],
    ids=["plain", "gqa causal lengths"],
)
def test_layouts_match_torch(layout: dict, case: Case) -> None:
    assert relative_error(*run(case, CHUNKED, cpu_placement(**layout))) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_single_head_shares_its_queries_over_tp_as_well(layout: dict) -> None:
    case = Case(heads=1, kv_heads=1, queries=77, keys=130, window=(20, 9), batch=3)
    assert relative_error(*run(case, CHUNKED, cpu_placement(**layout))) <= 1e-5


@pytest.mark.parametrize(
    "case",
    [Case(heads=3, kv_heads=3, queries=150, keys=150), Case(heads=6, kv_heads=3, is_causal=True, lengths=(3, 77))],
    ids=["plain", "gqa causal lengths"],
)
def test_a_kernel_of_heads_that_are_not_divided_shares_queries(case: Case) -> None:
    config, placement = dataclasses.replace(splash("auto"), over_mesh=False), cpu_placement(dp=2, sp=2, tp=2)
    assert relative_error(*run(case, config, placement)) <= 1e-5
    gqa = case.heads != case.kv_heads
    traced = jax.make_jaxpr(functools.partial(attention, placement=placement, config=config, enable_gqa=gqa))
    assert "comfy_tpu_splash" in str(traced(*(case.inputs()[name] for name in ("query", "key", "value"))))


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=4, kv_heads=4, mask=(2, 1, 1, 77)),
        Case(heads=4, kv_heads=2, queries=77, keys=130, window=(20, 9)),
        Case(heads=4, kv_heads=1, lengths=(3, 77), is_causal=True),
    ],
    ids=["key padding", "window gqa", "causal lengths mqa"],
)
@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_forced_sequence_parallelism_matches_torch(strategy: str, case: Case) -> None:
    config = AttentionConfig(implementation="chunked", sequence_parallel=strategy, dense_max_tokens=16)
    assert relative_error(*run(case, config, cpu_placement(dp=2, sp=4))) <= 1e-5


@pytest.mark.default_cases("ring window key padding", "ulysses causal")
@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        ("ulysses", Case(heads=4, kv_heads=2, queries=150, keys=150, is_causal=True)),
        ("ring", Case(heads=3, kv_heads=3, queries=150, keys=150)),
        ("ring", Case(heads=2, kv_heads=1, queries=150, keys=270, window=(60, 20), mask=(2, 1, 1, 270))),
    ],
    ids=["ulysses causal", "ring", "ring window key padding"],
)
def test_splash_under_sequence_parallelism_matches_torch(strategy: str, case: Case) -> None:
    assert relative_error(*run(case, splash(strategy), cpu_placement(dp=2, sp=2))) <= 1e-5


def test_ring_of_bfloat16_matches_torch() -> None:
    case = Case(heads=3, kv_heads=3, queries=150, keys=150)
    assert relative_error(*run(case, splash("ring"), cpu_placement(sp=2), dtype=jnp.bfloat16)) <= 2e-2


@pytest.mark.parametrize(
    "case",
    [
        Case(mask=(2, 4, 77, 77)),
        Case(queries=77, keys=130, mask=(77, 130), mask_kind="float"),
        Case(mask=(2, 1, 77, 1), kv_heads=2),
        Case(mask=(1, 4, 1, 77), batch=3),
    ],
    ids=["full", "broadcast float", "by row", "by head, batch does not divide"],
)
def test_dense_masks_match_torch(case: Case) -> None:
    assert relative_error(*run(case, CHUNKED, cpu_placement(dp=2, sp=2, tp=2))) <= 1e-5


def test_cross_attention_with_short_keys_moves_no_data() -> None:
    case = Case(heads=3, kv_heads=3, queries=77, keys=20, batch=2)
    placement = cpu_placement(dp=2, sp=4)
    config = AttentionConfig()
    assert relative_error(*run(case, config, placement)) <= 1e-5
    query = jax.ShapeDtypeStruct((2, 3, 80, 16), jnp.float32, sharding=placement.sharding("dp", None, "sp"))
    key = jax.ShapeDtypeStruct((2, 3, 20, 16), jnp.float32, sharding=placement.sharding("dp"))
    compiled = jax.jit(lambda q, k: attention(q, k, k, placement=placement, config=config)).lower(query, key).compile()
    text = compiled.as_text()
    assert "dot" in text
    for collective in ("all-to-all", "all-gather", "all-reduce", "collective-permute"):
        assert collective not in text


def test_ulysses_and_ring_are_what_they_say() -> None:
    placement = cpu_placement(sp=4)
    sharded = jax.ShapeDtypeStruct((1, 4, 80, 16), jnp.float32, sharding=placement.sharding(None, None, "sp"))

    def text(strategy: str) -> str:
        config = AttentionConfig(sequence_parallel=strategy)
        return (
            jax.jit(lambda q, k, v: attention(q, k, v, placement=placement, config=config))
            .lower(sharded, sharded, sharded)
            .as_text()
        )

    ulysses, ring = text("ulysses"), text("ring")
    assert "all_to_all" in ulysses
    assert "collective_permute" not in ulysses
    assert "collective_permute" in ring
    assert "all_to_all" not in ring
    assert text("auto") == ulysses


def test_a_mesh_of_one_device_needs_no_jit() -> None:
    case = Case(queries=30, keys=30)
    inputs = {name: jnp.asarray(array) for name, array in case.inputs().items()}
    got = attention(**inputs, placement=cpu_placement(), config=AttentionConfig())
    assert relative_error(np.asarray(got), case.expected(case.inputs())) <= 1e-5


def _parts(case: Case, count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """A sequence as two, of which the first has `count` tokens."""
    arrays = [jnp.asarray(case.inputs()[name]) for name in ("query", "key", "value")]
    return [array[:, :, :count] for array in arrays], [array[:, :, count:] for array in arrays]


@covering("layout, implementation, lengths", ["single", *LAYOUTS], ["chunked", "splash"], [None, (77, 65)], strength=1)
def test_two_sequences_attend_as_one(layout: str, implementation: str, lengths: tuple[int, int] | None) -> None:
    """Neither length divides by sp, and keys beyond the lengths take no part."""
    case = Case(heads=8, kv_heads=8, queries=77, keys=77, lengths=lengths)
    placement = cpu_placement(**LAYOUTS.get(layout, {}))
    config = CHUNKED if implementation == "chunked" else splash("auto")

    @jax.jit
    def both(first: list[jax.Array], second: list[jax.Array]) -> jax.Array:
        counts = None if lengths is None else jnp.asarray(lengths)
        out = joint_attention(first, second, placement=placement, config=config, kv_lengths=counts)
        return jnp.concatenate(out, axis=2)

    assert relative_error(np.asarray(both(*_parts(case, 59))), case.expected(case.inputs())) <= 1e-5


def test_two_sequences_are_joined_behind_the_exchange() -> None:
    placement = cpu_placement(sp=4)

    def parts(count: int) -> list[jax.ShapeDtypeStruct]:
        spread = placement.sharding(None, None, "sp")
        return [jax.ShapeDtypeStruct((1, 4, count, 16), jnp.float32, sharding=spread)] * 3

    joint = jax.jit(lambda a, b: joint_attention(a, b, placement=placement, config=AttentionConfig()))
    text = joint.lower(parts(80), parts(16)).compile().as_text()
    assert "all-to-all" in text
    for collective in ("all-gather", "all-reduce", "collective-permute"):
        assert collective not in text


def test_an_empty_second_sequence() -> None:
    placement, config = cpu_placement(sp=4), AttentionConfig(implementation="chunked")
    first = [jnp.asarray(np.random.default_rng(n).standard_normal((1, 4, 20, 16), np.float32)) for n in range(3)]
    joint = jax.jit(lambda a, b: joint_attention(a, b, placement=placement, config=config))
    out, empty = joint(first, [jnp.zeros((1, 4, 0, 16))] * 3)
    assert empty.shape == (1, 4, 0, 16)
    expected = jax.jit(lambda arrays: attention(*arrays, placement=None, config=config))(first)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_heads_that_do_not_divide_are_refused() -> None:
    query = jnp.zeros((1, 40, 8, 8))
    with pytest.raises(
        MeshError, match=r"^heads=40 is not divisible by tp=3; choose tp from 1, 2, 4, 5, 8, 10, 20, 40$"
    ):
        attention(query, query, query, placement=cpu_placement(tp=3), config=AttentionConfig())
    config = AttentionConfig(sequence_parallel="ulysses")
    message = (
        r"heads=20 a device \(40 over tp=2\) is not divisible by sp=3, which sequence_parallel=\"ulysses\" needs; "
        r"choose sp from 1, 2, 4, 5, 10, 20, or sequence_parallel=\"ring\""
    )
    with pytest.raises(MeshError, match=message):
        attention(query, query, query, placement=cpu_placement(sp=3, tp=2), config=config)
