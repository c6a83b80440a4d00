"""Norm, RoPE and attention as one sequence of kernels give what the parts give, on every layout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from comfy_tpu.bridge import rotate_pairs
from comfy_tpu.config import AttentionConfig, BlockSizes, TokenWindow
from comfy_tpu.kernels.rotary_attention import Rotary, has_rotary_attention, rotary_attention
from comfy_tpu.kernels.splash import Shares, share_tile
from tests.kernels.attention_reference import cpu_placement, relative_error

CONFIG = AttentionConfig(
    implementation="splash", block_sizes=BlockSizes(query=128, key=128, key_compute=128), dense_max_tokens=16
)
HEADS, HEAD_DIM, EPSILON = 8, 128, 1e-6
LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "sp2": {"sp": 2},
    "dp2 sp4": {"dp": 2, "sp": 4},
    "sp8": {"sp": 8},
    "dp2 tp4": {"dp": 2, "tp": 4},
    "dp2 sp2 tp2": {"dp": 2, "sp": 2, "tp": 2},
}


def draw(tokens: int, dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    arrays = {name: rng.standard_normal((2, tokens, HEADS * HEAD_DIM), np.float32) for name in ("q", "k", "v")}
    arrays["k"] += 2.0 * rng.standard_normal(HEADS * HEAD_DIM, np.float32)  # a mean that is not zero
    angles = rng.uniform(-30, 30, (tokens, HEAD_DIM // 2))
    arrays |= {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
    weights = {f"{name}_weight": 1 + 0.2 * rng.standard_normal(HEADS * HEAD_DIM, np.float32) for name in "qk"}
    rounded = {name: np.asarray(jnp.asarray(array, dtype), np.float32) for name, array in (arrays | weights).items()}
    return rounded | {name: arrays[name] for name in ("cosine", "sine")}


def in_torch(arrays: dict[str, np.ndarray]) -> np.ndarray:
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    tables = tensors["cosine"][:, None], tensors["sine"][:, None]

    def heads(name: str) -> torch.Tensor:
        x = tensors[name]
        if name != "v":
            x = torch.nn.functional.rms_norm(x, x.shape[2:], tensors[f"{name}_weight"], EPSILON)
        x = x.unflatten(2, (HEADS, -1))
        return (x if name == "v" else rotate_pairs(x, *tables)).transpose(1, 2)

    out = torch.nn.functional.scaled_dot_product_attention(heads("q"), heads("k"), heads("v"))
    return out.transpose(1, 2).flatten(2).numpy()


def in_kernels(arrays: dict[str, np.ndarray], layout: dict[str, int], dtype: Any) -> np.ndarray:
    placement = cpu_placement(**layout)
    shape = arrays["q"].shape
    assert has_rotary_attention(shape, HEADS, dtype, placement, CONFIG)

    @jax.jit
    def call(given: dict[str, jax.Array]) -> jax.Array:
        made = {name: array.astype(dtype) if "sine" not in name else array for name, array in given.items()}
        rotary = Rotary(made["q_weight"], made["k_weight"], EPSILON, made["cosine"], made["sine"])
        options = {"heads": HEADS, "placement": placement, "config": CONFIG}
        return rotary_attention(made["q"], made["k"], made["v"], rotary, **options)

    return np.asarray(call({name: jnp.asarray(array) for name, array in arrays.items()}), np.float32)


def check(name: str, tokens: int) -> None:
    arrays = draw(tokens, jnp.float32)
    assert relative_error(in_kernels(arrays, LAYOUTS[name], jnp.float32), in_torch(arrays)) <= 1e-5


@pytest.mark.parametrize("name", [pytest.param("dp2 sp4", marks=pytest.mark.slow), "dp2 sp2 tp2"])
def test_layouts_match_torch(name: str) -> None:
    # At sp2, the 268 tokens of a device are no whole registers, and tiles meet the gaps.
    check(name, 536)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_layouts_match_torch(name: str) -> None:
    # At sp2, sp4 and sp8 the tokens of a device, 536, 268 and 134, are no whole registers, and tiles meet the gaps.
    check(name, 1072)


@pytest.mark.thorough  # by default: float32, above, and bfloat16 in test_parity.py
def test_bfloat16() -> None:
    arrays = draw(300, jnp.bfloat16)
    assert relative_error(in_kernels(arrays, {"sp": 2}, jnp.bfloat16), in_torch(arrays)) <= 2e-2


@pytest.mark.parametrize(
    ("tokens", "sides"),
    [
        (18_900, (2048, 2048, 1024)),
        (8190, (2048, 2048, 1024)),
        (700, (640, 640, 640)),
        (1500, (1408, 1024, 1024)),
        (100, None),
    ],
)
def test_a_tile_is_no_longer_than_a_share(tokens: int, sides: tuple[int, ...] | None) -> None:
    shares = Shares(tokens, -(-tokens // 16) * 16)
    tile = share_tile(shares, 4, HEAD_DIM, "v6e", None)
    assert tile == (None if sides is None else BlockSizes(*sides))


@pytest.mark.parametrize(
    ("layout", "shape", "config"),
    [
        ({"sp": 4}, (2, 1102, 1024), CONFIG),
        ({"dp": 2}, (1, 1100, 1024), CONFIG),
        ({"tp": 8}, (2, 1100, 512), CONFIG),
        ({"sp": 8}, (2, 800, 1024), CONFIG),
        ({"sp": 4}, (2, 1100, 1024), dataclasses.replace(CONFIG, sequence_parallel="ring")),
        ({"sp": 4}, (2, 1100, 1024), dataclasses.replace(CONFIG, window=TokenWindow(9, 9))),
        ({"sp": 4}, (2, 1100, 1024), dataclasses.replace(CONFIG, over_mesh=False)),
        ({"sp": 4}, (2, 1100, 1024), dataclasses.replace(CONFIG, implementation="auto")),
    ],
    ids=["tokens", "batch", "half lanes", "tiles longer than a share", "ring", "window", "not over the mesh", "auto"],
)
def test_what_it_does_not_take(layout: dict[str, int], shape: tuple[int, ...], config: AttentionConfig) -> None:
    assert not has_rotary_attention(shape, HEADS, jnp.dtype(jnp.float32), cpu_placement(**layout), config)
