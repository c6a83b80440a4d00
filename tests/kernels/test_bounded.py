"""Both forms of the splash kernel's softmax are right, and a block of queries takes one that is safe for it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.config import AttentionConfig, BlockSizes
from comfy_tpu.kernels import attention, splash
from comfy_tpu.kernels.masking import Masking
from comfy_tpu.kernels.tuning import block_sizes
from tests.covering import covering
from tests.kernels.attention_reference import Case, relative_error, run

CONFIG = AttentionConfig(
    implementation="splash", smooth_keys=False, block_sizes=BlockSizes(query=128, key=256, key_compute=128)
)


BOUNDED = (
    "random",
    "bound far above the largest score",
    "every score is the lowest that the bound allows",
    "all keys equal",
    "the largest score comes last",
)
EXACT = ("one huge key", "scores over 2^100", "squares over float32", "all keys equal and long")


def set_inputs(kind: str, query: np.ndarray, key: np.ndarray) -> None:
    """Changes the queries and keys of one head, [L, D] each."""
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal(query.shape[1], np.float32)
    direction = drawn / np.linalg.norm(drawn)
    if kind == "bound far above the largest score":
        # |q|·|k| is about 110 powers of two, and scores are far below it.
        query *= 14.0 / np.linalg.norm(query, axis=-1, keepdims=True)
        key -= 1.0
        key *= 5.4 / np.linalg.norm(key, axis=-1, keepdims=True)
    elif kind == "every score is the lowest that the bound allows":
        query[...] = 6.0 * direction
        key[...] = -6.5 * direction + 0.05 * rng.standard_normal(key.shape, np.float32)
    elif kind == "all keys equal":
        key[...] = 6.0 * direction
    elif kind == "all keys equal and long":
        key[...] = 600.0 * direction
    elif kind == "the largest score comes last":
        query[...] = 7.0 * direction
        key[...] = (7.0 * np.linspace(-1, 1, len(key), dtype=np.float32))[:, None] * direction
    elif kind == "one huge key":
        key[200] *= 1e4
    elif kind == "scores over 2^100":
        query *= 2.0**50
        key *= 2.0**52
    elif kind == "squares over float32":
        query[5] *= 2.0**70


@dataclasses.dataclass(frozen=True)
class Adversarial(Case):
    """A head of each kind."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 150
    keys: int = 300
    kinds: tuple[str, ...] = ("random", "random")

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        arrays = super().inputs(seed)
        for head, kind in enumerate(self.kinds):
            set_inputs(kind, arrays["query"][0, head], arrays["key"][0, head])
        return arrays


ALL = Adversarial(heads=9, kv_heads=9, scale=1.0, kinds=(*BOUNDED, *EXACT))


def exact_heads(case: Case, monkeypatch: pytest.MonkeyPatch, config: AttentionConfig = CONFIG) -> list[bool]:
    """Whether any block of each head took the exact form: here it adds NaN."""

    def add_nan(scores: jax.Array, values: jax.Array, state: splash.State) -> None:
        state.total[...] = jnp.full_like(state.total, jnp.nan)
        state.weight[...] = jnp.ones_like(state.weight)

    with monkeypatch.context() as patch:
        patch.setattr(splash, "_add_exact", add_nan)
        inputs = {name: jnp.asarray(array) for name, array in case.inputs().items()}
        call = jax.jit(lambda arrays: attention(**arrays, placement=None, config=config, **case.options()))
        return np.isnan(np.asarray(call(inputs))).any(axis=(0, 2, 3)).tolist()


def test_exact_form_for_the_heads_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_heads(ALL, monkeypatch) == [False] * len(BOUNDED) + [True] * len(EXACT)


@pytest.mark.default_cases("80.0-float32")
@covering(
    "depth, dtype",
    [splash.DEPTH, -math.inf],
    [jnp.float32, jnp.bfloat16],
    strength=0,
    always=[(splash.DEPTH, jnp.float32), (-math.inf, jnp.bfloat16)],
)
def test_both_forms_match_torch(depth: float, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash, "DEPTH", depth)
    got, expected = run(ALL, CONFIG, dtype=dtype)
    for head, kind in enumerate(ALL.kinds):
        error = relative_error(got[:, head], expected[:, head])
        assert error <= (1e-5 if dtype == jnp.float32 else 2e-2), kind


@pytest.mark.thorough  # by default: the exact form
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
def test_exact_form_of_a_block_in_several_parts(dtype: Any) -> None:
    config = dataclasses.replace(CONFIG, block_sizes=BlockSizes(query=384, key=256, key_compute=128))
    case = Adversarial(heads=4, kv_heads=4, queries=380, scale=1.0, kinds=EXACT)
    got, expected = run(case, config, dtype=dtype)
    for head, kind in enumerate(case.kinds):
        assert relative_error(got[:, head], expected[:, head]) <= (1e-5 if dtype == jnp.float32 else 2e-2), kind


@pytest.mark.thorough  # by default: the exact and the bounded form, above
def test_steps_of_different_size() -> None:
    case = Adversarial(heads=2, kv_heads=2, keys=700, scale=1.0, kinds=("random", "one huge key"))
    inputs = {name: jnp.asarray(array) for name, array in case.inputs().items()}
    blocks = BlockSizes(query=128, key=1024, key_compute=512)
    assert block_sizes("v6e", 150, 700, 128, blocks) == BlockSizes(query=128, key=768, key_compute=512)
    got, _ = splash.splash_attention(
        **inputs,
        masking=Masking(),
        scale=1.0,
        chip="v6e",
        blocks=blocks,
        interpret=True,
        partial=False,
        smooth_keys=False,
    )
    assert relative_error(np.asarray(got), case.expected(inputs)) <= 1e-5


@pytest.mark.default_cases("v5e-False")
@pytest.mark.parametrize(
    ("chip", "is_close"), [("v6e", True), pytest.param("v7x", True, marks=pytest.mark.slow), ("v5e", False)]
)
def test_scores_of_thousands_keep_what_bfloat16_rounds_off_queries(chip: str, is_close: bool) -> None:
    # One of 380 rows has two keys whose scores of 2^100 differ by less than that.
    case = Adversarial(heads=4, kv_heads=4, queries=380, scale=1.0, kinds=EXACT)
    inputs = {name: jnp.asarray(array, jnp.bfloat16) for name, array in case.inputs().items()}
    got, _ = splash.splash_attention(
        **inputs,
        masking=Masking(),
        scale=1.0,
        chip=chip,
        blocks=BlockSizes(query=384, key=256, key_compute=128),
        interpret=True,
        partial=False,
        smooth_keys=False,
    )
    head = EXACT.index("scores over 2^100")
    error = relative_error(np.asarray(got, np.float32)[:, head], case.expected(inputs)[:, head])
    assert (error <= 2e-2) == is_close


class ShiftedKeys(Adversarial):
    """Keys with a large common part: their norms say little about their scores' differences."""

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        arrays = super().inputs(seed)
        return {**arrays, "key": arrays["key"] + 300.0}


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("smooth_keys", [True, False])
def test_bounds_count_from_the_mean_key(smooth_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, smooth_keys=smooth_keys)
    case = ShiftedKeys(lengths=(270,))
    assert exact_heads(case, monkeypatch, config) == [not smooth_keys] * 2
    error = relative_error(*run(case, config))
    assert error <= 1e-5 if smooth_keys else 1e-5 < error <= 1e-3, "float32 rounds scores of 10⁴ to 10⁻³"


class NanPadding(Adversarial):
    """Keys and values that a length hides are NaN, in the block of visible ones too."""

    def expected(self, inputs: dict[str, Any]) -> np.ndarray:
        clean = {name: jnp.nan_to_num(inputs[name], nan=0.0) for name in ("query", "key", "value")}
        return super().expected({**inputs, **clean})

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        arrays = super().inputs(seed)
        assert self.lengths is not None
        for name in ("key", "value"):
            arrays[name][:, :, self.lengths[0] :] = np.nan
        return arrays


@pytest.mark.default_cases("bounded")
@pytest.mark.parametrize("depth", [splash.DEPTH, -math.inf], ids=["bounded", "exact"])
def test_nan_in_hidden_padding(depth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash, "DEPTH", depth)
    config = dataclasses.replace(CONFIG, smooth_keys=True)
    case = NanPadding(lengths=(170,))
    assert relative_error(*run(case, config)) <= 1e-5
    assert exact_heads(case, monkeypatch, config) == [depth < 0] * 2


HIDING: dict[str, dict[str, Any]] = {
    "rows without keys": {"queries": 400, "keys": 130, "window": (5, 3)},
    "key mask": {"mask": (1, 1, 1, 300)},
    "float key mask": {"mask": (1, 1, 1, 300), "mask_kind": "float"},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize(
    "options",
    # What a kind of mask hides by default: test_parity.py.
    [
        pytest.param(each, id=name, marks=[] if name in ("key mask", "rows without keys") else [pytest.mark.slow])
        for name, each in HIDING.items()
    ],
)
def test_bounded_form_with_hidden_keys(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Adversarial(**options)
    assert exact_heads(case, monkeypatch) == [False, False]
    got, expected = run(case, CONFIG)
    assert np.abs(got - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1.0)


@dataclasses.dataclass(frozen=True)
class LargeBias(Adversarial):
    """The first keys, by which the form is chosen, have a bias far above the others, or far below."""

    mask: tuple[int, ...] | None = (1, 1, 1, 300)
    mask_kind: str = "float"
    bias: float = 0.0

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        arrays = super().inputs(seed)
        arrays["mask"][...] = 0.0
        arrays["mask"][..., :140] = self.bias
        return arrays


@pytest.mark.default_cases("300.0-False")
@pytest.mark.parametrize(("bias", "is_exact"), [(300.0, False), (-300.0, True)])
def test_large_bias(bias: float, is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_heads(LargeBias(bias=bias), monkeypatch) == [is_exact, is_exact]
    assert relative_error(*run(LargeBias(bias=bias), CONFIG)) <= 1e-5
