"""The rotary kernel computes what `rotate_pairs` does, after torch's RMS norm where it has one."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from comfy_tpu.bridge import rotate_pairs
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels import rotary
from comfy_tpu.kernels.rotary import rotate_heads

interpreted = jax.jit(
    functools.partial(rotate_heads, chip="v6e", interpret=True), static_argnames=("head_dim", "groups", "epsilon")
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows, so that few rows are several blocks, and a loop that compiles fast."""
    monkeypatch.setattr(rotary, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(rotary, "_UNROLLED", 1)


def draw(batch: int, rows: int, heads: int, head_dim: int, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(rows + heads)
    x = jnp.asarray(rng.standard_normal((batch, rows, heads * head_dim), np.float32), dtype)
    angles = rng.uniform(-30, 30, (rows, head_dim // 2))
    return x, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def to_torch(array: Any) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array, np.float32))
    return tensor.bfloat16() if array.dtype == jnp.bfloat16 else tensor


def in_torch(x: torch.Tensor, cosine: Any, sine: Any, head_dim: int, groups: int) -> np.ndarray:
    tables = (to_torch(table)[:, None] for table in (cosine, sine))
    rotated = rotate_pairs(x.unflatten(2, (-1, head_dim)), *tables).flatten(2)
    return torch.stack(rotated.chunk(groups, dim=2)).float().numpy()


def ulps(got: Any, wanted: np.ndarray) -> float:
    """The largest difference, in steps between neighbouring bfloat16 numbers.

    Below 2⁻¹² a step is less than the rounding of the float32 products whose difference a value is: there, the step at
    2⁻¹² counts, 1e-6.
    """
    _, exponent = np.frexp(np.maximum(np.abs(wanted), 2.0**-12))
    return float(np.max(np.abs(np.asarray(got, np.float32) - wanted) / np.ldexp(1.0, exponent - 8)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "head_dim", "groups"),
    [(1, 16, 2, 128, 1), (1, 37, 2, 128, 2), (2, 50, 4, 128, 4), (1, 5, 8, 128, 4), (2, 37, 2, 256, 2)],
    ids=["one block", "ragged", "batch of two", "less than a block", "two registers a head"],
)
def test_pairs_are_rotated(batch: int, rows: int, heads: int, head_dim: int, groups: int, dtype: Any) -> None:
    x, cosine, sine = draw(batch, rows, heads, head_dim, dtype)
    got = interpreted(x, cosine, sine, head_dim=head_dim, groups=groups)
    wanted = in_torch(to_torch(x), cosine, sine, head_dim, groups)
    assert got.shape == (groups, batch, rows, heads * head_dim // groups)
    assert got.dtype == dtype
    if dtype == jnp.float32:
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    else:
        assert ulps(got, wanted) <= 1


def test_padded_rows_come_after_those_of_x() -> None:
    x, cosine, sine = draw(1, 37, 2, 128)
    got = rotate_heads(x, cosine, sine, head_dim=128, padded_rows=48, chip="v6e", interpret=True)
    assert got.shape == (1, 1, 48, 256)
    np.testing.assert_allclose(got[:, :, :37], in_torch(to_torch(x), cosine, sine, 128, 1), rtol=0, atol=1e-6)


def test_blocks_of_the_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, cosine, sine = draw(1, 1100, 2, 128)
    got = rotate_heads(x, cosine, sine, head_dim=128, chip="v6e", interpret=True)
    np.testing.assert_allclose(got, in_torch(to_torch(x), cosine, sine, 128, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "itemsize", "rows", "expected"),
    [(5120, 2, 18_900, 256), (5120, 4, 18_900, 128), (1280, 2, 18_900, 1024), (5120, 2, 37, 64), (65_536, 4, 999, 64)],
)
def test_block_rows(columns: int, itemsize: int, rows: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert rotary._block_rows(columns * itemsize, rows) == expected


@pytest.mark.parametrize(
    ("is_given", "has_weight", "dtype"),
    [
        (False, True, jnp.bfloat16),
        (True, True, jnp.bfloat16),
        (False, True, jnp.float32),
        (True, False, jnp.float32),
        (False, False, jnp.bfloat16),
    ],
)
def test_norm_before_the_rotation(is_given: bool, has_weight: bool, dtype: Any) -> None:
    x, cosine, sine = draw(2, 83, 4, 128, dtype)
    x = x * jnp.linspace(0.01, 30, 83, dtype=dtype)[:, None]
    weight = jnp.linspace(-2, 3, 512).astype(dtype) if has_weight else None
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=2, keepdims=True)
    options = {"inverse_rms": jax.lax.rsqrt(squares + 1e-6)} if is_given else {"epsilon": 1e-6}
    got = interpreted(x, cosine, sine, head_dim=128, groups=2, weight=weight, **options)

    normed = torch.nn.functional.rms_norm(
        to_torch(x).float(), (512,), None if weight is None else to_torch(weight).float(), 1e-6
    )
    normed = normed.type_as(to_torch(x))
    wanted = in_torch(normed, cosine, sine, 128, 2)
    if dtype == jnp.float32:
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    else:
        # The norm's last bit may round a value of a pair the other way: one step of that value, before the rotation.
        partner = torch.stack(normed.unflatten(2, (-1, 2)).norm(dim=3).repeat_interleave(2, 2).chunk(2, dim=2))
        off = np.abs(np.asarray(got, np.float32) - wanted)
        assert np.all(off <= 2.0**-7 * partner.float().numpy())
        assert np.mean(off > 0) < 0.01


def test_nan_stays_in_its_pair() -> None:
    x, cosine, sine = draw(1, 70, 2, 128)
    x = x.at[0, 3, 127].set(jnp.nan).at[0, 66, 130].set(jnp.inf)
    got = np.asarray(interpreted(x, cosine, sine, head_dim=128))[0, 0]
    assert np.argwhere(~np.isfinite(got)).tolist() == [[3, 126], [3, 127], [66, 130], [66, 131]]


def test_nan_under_a_norm_stays_in_its_row() -> None:
    x, cosine, sine = draw(1, 70, 2, 128)
    x = x.at[0, 3, 127].set(jnp.nan)
    got = np.asarray(interpreted(x, cosine, sine, head_dim=128, epsilon=1e-6))[0, 0]
    assert np.all(np.isnan(got[3]))
    assert np.all(np.isfinite(np.delete(got, 3, axis=0)))


def test_one_kernel_and_no_copy_of_x_in_a_tpu_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((1, 18_900, 5120), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((18_900, 64), jnp.float32)
    call = jax.jit(functools.partial(rotate_heads, head_dim=128, groups=4, chip="v6e", interpret=False))
    text = jax.export.export(call, platforms=["tpu"])(x, table, table).mlir_module()
    assert text.count("tpu_custom_call") == 1
    producers = [line for line in text.splitlines() if "= stablehlo." in line and "x5120x" in line.split("->")[-1]]
    assert not producers, "x goes into the kernel as it is"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 64}, "head_dim=64 is not a multiple of 128"),
        ({"head_dim": 384}, "x has 512 columns; expected whole heads of head_dim=384"),
        ({"groups": 3}, "heads=4 is not divisible by groups=3"),
        ({"padded_rows": 7}, "padded_rows=7 does not suit the 8 rows of x; expected 8 to 16"),
        ({"padded_rows": 0}, "padded_rows=0 does not suit the 8 rows of x; expected 8 to 16"),
        ({"padded_rows": 17}, "padded_rows=17 does not suit the 8 rows of x; expected 8 to 16"),
        ({"sine": jnp.zeros((9, 64))}, r"sine has shape \[9, 64\]; expected .* \[8, 64\]"),
        ({"x": jnp.zeros((8, 512))}, r"x is float32\[8, 512\]; expected bfloat16 or float32 \[batch"),
        ({"x": jnp.zeros((1, 8, 512), jnp.float16)}, "x is float16"),
        ({"weight": jnp.zeros(512)}, "weight was given without a norm; pass epsilon"),
        ({"weight": jnp.zeros(128), "epsilon": 1e-6}, r"weight has shape \[128\]; expected \[512\]"),
        ({"inverse_rms": jnp.zeros((1, 8))}, r"inverse_rms has shape \[1, 8\]; expected \[1, 8, 1\]"),
        ({"inverse_rms": jnp.zeros((1, 8, 1)), "epsilon": 1e-6}, "epsilon and inverse_rms were both given"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": jnp.zeros((1, 8, 512)),
        "cosine": jnp.ones((8, 64)),
        "sine": jnp.zeros((8, 64)),
        "head_dim": 128,
    }
    with pytest.raises(InvalidValueError, match=message):
        rotate_heads(**given | changed, chip="v6e", interpret=True)
