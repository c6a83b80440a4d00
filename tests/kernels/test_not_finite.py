"""NaN and infinity reach the result of every kernel. Zeros in their place hide a broken model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.config import AttentionConfig, BlockSizes
from comfy_tpu.errors import MeshError
from comfy_tpu.kernels import attention, joint_attention
from comfy_tpu.kernels.masking import merge_attention
from comfy_tpu.kernels.quantized import quantized_linear
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement
from tests.covering import covering
from tests.kernels.attention_reference import Case, cpu_placement, run

CHUNKED = AttentionConfig(implementation="chunked", dense_max_tokens=16)
SPLASH = AttentionConfig(
    implementation="splash",
    block_sizes=BlockSizes(query=128, key=128, key_compute=128),
    dense_max_tokens=16,
)
CONFIGS = {"dense": AttentionConfig(implementation="chunked"), "chunked": CHUNKED, "splash": SPLASH}


@dataclasses.dataclass(frozen=True)
class Poisoned(Case):
    """One number of one sequence and head is not finite."""

    where: str = "key"
    what: float = float("nan")

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        inputs = super().inputs(seed)
        inputs[self.where][0, 1, 3, 2] = self.what
        return inputs


POISON: dict[str, dict[str, Any]] = {
    "query": {"where": "query"},
    "key": {"where": "key"},
    "value": {"where": "value"},
    "infinite value": {"where": "value", "what": float("inf")},
}
MASKS: dict[str, dict[str, Any]] = {
    "": {},
    " lengths": {"lengths": (60, 77)},
    " key mask": {"mask": (2, 1, 1, 77), "mask_kind": "float"},
}


class VisibleMask(Poisoned):
    """A key mask that hides some keys, but not the poisoned one: beside a weight of 0 torch has NaN, too."""

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        inputs = super().inputs(seed)
        if "mask" in inputs:
            inputs["mask"][..., 3] = 0.0
        return inputs


def check(case: Case, config: AttentionConfig, placement: Placement | None = None, dtype: Any = jnp.float32) -> None:
    """Where torch's result is not finite, ours is not either, and nowhere else."""
    got, expected = run(case, config, placement, dtype=dtype)
    broken = ~np.isfinite(expected)
    assert broken.any()
    assert not broken.all()
    np.testing.assert_array_equal(~np.isfinite(got), broken)


@covering("config, poison, masks", CONFIGS, POISON, MASKS)
def test_one_device(config: str, poison: str, masks: str) -> None:
    check(VisibleMask(**POISON[poison], **MASKS[masks]), CONFIGS[config])


@pytest.mark.default_cases("chunked-ulysses-query", "chunked-ulysses-value", "chunked-ulysses-infinite value")
@covering("config, strategy, poison", ["chunked", "splash"], ["ulysses", "ring"], POISON, strength=1)
def test_over_the_mesh(config: str, strategy: str, poison: str) -> None:
    chosen = dataclasses.replace(CONFIGS[config], sequence_parallel=strategy)
    check(Poisoned(**POISON[poison]), chosen, cpu_placement(dp=2, sp=4))


@pytest.mark.parametrize("config", [CHUNKED, SPLASH], ids=["chunked", "splash"])
def test_keys_that_every_device_holds(config: AttentionConfig) -> None:
    check(Poisoned(queries=130, keys=16), config, cpu_placement(dp=2, sp=2, tp=2))


@pytest.mark.parametrize("config", [CHUNKED, SPLASH], ids=["chunked", "splash"])
@pytest.mark.parametrize("part", [0, 1], ids=["first", "second"])
def test_two_sequences_as_one(config: AttentionConfig, part: int) -> None:
    inputs = Case(heads=4).inputs()
    parts = [[inputs[name][:, :, rows] for name in ("query", "key", "value")] for rows in (slice(0, 60), slice(60, 77))]
    parts[part][1][0, 1, 3, 2] = np.nan
    outs = jax.jit(lambda first, second: joint_attention(first, second, placement=cpu_placement(sp=4), config=config))(
        *parts
    )
    for out in outs:
        assert np.isnan(out[0, 1]).all()
        assert np.isfinite(np.delete(np.asarray(out), 1, axis=1)).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_all_keys(config: AttentionConfig) -> None:
    inputs = Case().inputs()
    out = attention(inputs["query"], inputs["key"] * np.nan, inputs["value"], placement=None, config=config)
    assert np.isnan(out).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_mask(config: AttentionConfig) -> None:
    """The last key, behind others that are hidden: a NaN is not a key that can be skipped."""
    inputs = Case().inputs()
    mask = np.zeros((2, 1, 1, 77), np.float32)
    mask[0, ..., 40:] = -np.inf
    mask[0, ..., -1] = np.nan
    out = attention(**inputs, mask=mask, placement=None, config=config)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("broken", ["earlier", "later"])
def test_merged_parts(broken: str) -> None:
    """Also beside a part that saw no key."""
    out, empty = jnp.ones((2, 3)), jnp.zeros((2, 3))
    found, nothing = jnp.array([0.5, jnp.nan]), jnp.full(2, -jnp.inf)
    parts = [(out, found), (empty, nothing)]
    merged, logsumexp = (
        merge_attention(*parts[0], *parts[1]) if broken == "earlier" else merge_attention(*parts[1], *parts[0])
    )
    np.testing.assert_allclose(merged[0], 1.0)
    assert np.isnan(merged[1]).all()
    assert np.isnan(logsumexp[1])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_eight_bit_products(dtype: Any, poison: float) -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 4] = poison
    out = quantized_linear(jnp.asarray(x), jnp.ones((5, 8), dtype), jnp.ones(5), None, platform="cpu")
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(np.delete(np.asarray(out), 1, axis=0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("implementation", ["cudnn", "hopper"])
def test_gpu(implementation: str, dtype: Any, poison: dict[str, Any]) -> None:
    try:
        placement = make_placement("single", platform="gpu")
    except MeshError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")
    case = Poisoned(head_dim=128, value_dim=128, queries=300, keys=300, **poison)
    check(case, AttentionConfig(implementation=implementation), placement, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("masks", [{"lengths": (60, 77)}, {"is_causal": True}], ids=["lengths", "causal"])
def test_gpu_with_masks(masks: dict[str, Any]) -> None:
    try:
        placement = make_placement("single", platform="gpu")
    except MeshError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")
    case = Poisoned(head_dim=64, value_dim=64, **masks)
    got, expected = run(case, AttentionConfig(implementation="cudnn"), placement, dtype=jnp.bfloat16)
    # Rows that see the NaN are NaN. In rows above a causal diagonal torch multiplies it by 0, and cuDNN does not.
    seen = np.isnan(expected) & (np.arange(77)[:, None] >= 3) if case.is_causal else np.isnan(expected)
    assert np.isnan(got[seen]).all()
    assert np.isfinite(got[np.isfinite(expected)]).all()
