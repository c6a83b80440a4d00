"""Sliding tile attention against a dense mask of the same pattern, by every kernel that has it, on every layout."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from comfy_tpu.config import AttentionConfig, TileWindow
from comfy_tpu.errors import InvalidValueError, MeshError, UnsupportedError
from comfy_tpu.kernels import attention, joint_attention
from comfy_tpu.kernels.windows import make_schedule
from tests.kernels.attention_reference import absent_placement, cpu_placement, relative_error

CHUNKED = AttentionConfig(implementation="chunked")
SPLASH = AttentionConfig(implementation="splash")
EVEN = TileWindow((2, 2, 3), (1, 3, 1)), (4, 6, 6)
UNEVEN = TileWindow((2, 4, 3), (2, 1, 3)), (5, 5, 7)
"""Tiles of 3 and 2 frames, 3 and 2 rows, 3 and 2 columns."""


def near(place: int, side: int, tile: int, seen: int) -> range:
    """The positions along one axis that a position sees, worked out tile by tile and not as the code does it."""
    count = -(-side // tile)
    tiles = [[x for x in range(side) if i * side // count <= x < (i + 1) * side // count] for i in range(count)]
    (own,) = (i for i, tile in enumerate(tiles) if place in tile)
    width = min(seen, count)
    candidates = [range(first, first + width) for first in range(count - width + 1)]
    chosen = min(candidates, key=lambda window: abs(window[0] + width // 2 - own))
    return range(tiles[chosen[0]][0], tiles[chosen[-1]][-1] + 1)


def dense_mask(window: TileWindow, grid: tuple[int, int, int], others: int) -> np.ndarray:
    tokens = int(np.prod(grid))
    mask = np.ones((tokens + others, tokens + others), bool)
    for query in itertools.product(*map(range, grid)):
        row = np.zeros(grid, bool)
        row[np.ix_(*(near(*each) for each in zip(query, grid, window.tile, window.tiles, strict=True)))] = True
        mask[np.ravel_multi_index(query, grid), :tokens] = row.reshape(-1)
    return mask


def inputs(tokens: int, heads: int = 8, batch: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((batch, heads, tokens, 16), np.float32) + (i == 1) for i in range(3)]


def expected(arrays: list[np.ndarray], mask: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    full = np.broadcast_to(mask, (arrays[0].shape[0], 1, *mask.shape)).copy()
    for row, length in zip(full, [] if lengths is None else lengths, strict=False):
        row[:, :, length:] = False
    tensors = (torch.tensor(array, dtype=torch.float64) for array in arrays)
    return torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=torch.tensor(full)).numpy()


def test_the_mask_of_the_reference_is_sparse_and_moves_inwards_at_borders() -> None:
    mask = dense_mask(*EVEN, others=1)
    assert mask[-1].all()
    assert mask[:, -1].all()
    assert mask[:-1, :-1].sum(1).tolist() == [36] * 144  # 1 × 3 × 1 tiles of 12 tokens, also at a border
    assert make_schedule(*EVEN).attended_share == 36 / 144


# With tp, splash is the program of one device with fewer heads. Interpreted, it takes its time: one head where it can.
@pytest.mark.default_cases(
    "config0-layout0-case0-shape0",
    "config1-layout1-case1-shape1",
    "config2-layout2-case2-shape2",
    "config5-layout5-case5-shape5",
    "config6-layout6-case6-shape6",
)
@pytest.mark.parametrize(
    ("config", "layout", "case", "shape"),
    [
        (CHUNKED, {}, EVEN, (2, 8)),
        (CHUNKED, {}, UNEVEN, (2, 8)),
        (CHUNKED, {"dp": 2, "sp": 4}, UNEVEN, (2, 8)),
        pytest.param(CHUNKED, {"dp": 2, "sp": 4}, EVEN, (2, 8), marks=pytest.mark.slow),
        pytest.param(CHUNKED, {"dp": 2, "tp": 4}, UNEVEN, (2, 8), marks=pytest.mark.slow),
        (SPLASH, {}, EVEN, (1, 1)),
        (SPLASH, {}, UNEVEN, (1, 1)),
        (SPLASH, {"sp": 2}, UNEVEN, (1, 2)),
        pytest.param(SPLASH, {"dp": 2, "sp": 4}, EVEN, (2, 8), marks=pytest.mark.slow),
    ],
)
def test_self_attention_matches_a_dense_mask(config, layout: dict, case: tuple, shape: tuple[int, int]) -> None:
    window, grid = case
    batch, heads = shape
    arrays = inputs(int(np.prod(grid)), heads, batch)
    placement = cpu_placement(**layout) if layout else None
    tiles = make_schedule(window, grid)
    run = jax.jit(lambda *given: attention(*given, placement=placement, config=config, tiles=tiles))
    assert relative_error(np.asarray(run(*arrays)), expected(arrays, dense_mask(window, grid, 0))) <= 1e-5


@pytest.mark.default_cases("dp2 sp4", "one")
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ({}, CHUNKED),
        ({}, SPLASH),
        ({"dp": 2, "sp": 4}, CHUNKED),
        pytest.param({"dp": 2, "sp": 4}, SPLASH, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 4}, CHUNKED, marks=pytest.mark.slow),
    ],
    ids=["one", "one splash", "dp2 sp4", "dp2 sp4 splash", "dp2 tp4"],
)
def test_text_sees_and_is_seen_by_all(layout: dict, config: AttentionConfig) -> None:
    window, grid = UNEVEN
    tokens, others = int(np.prod(grid)), 7
    heads = 8 if layout else 1
    arrays, lengths = inputs(tokens + others, heads), np.array([tokens + 3, tokens + others], np.int32)
    placement = cpu_placement(**layout) if layout else None
    first, second = ([array[:, :, part] for array in arrays] for part in (slice(tokens), slice(tokens, None)))
    tiles = make_schedule(window, grid)
    run = jax.jit(
        lambda first, second, lengths: joint_attention(
            first, second, placement=placement, config=config, kv_lengths=lengths, tiles=tiles
        )
    )
    got = np.concatenate([np.asarray(part) for part in run(first, second, lengths)], axis=2)
    assert relative_error(got, expected(arrays, dense_mask(window, grid, others), lengths)) <= 1e-5


def test_tiles_that_are_gathered_one_by_one_match_those_gathered_together(monkeypatch) -> None:
    window, grid = UNEVEN
    arrays, tiles = inputs(int(np.prod(grid))), make_schedule(window, grid)
    monkeypatch.setattr("comfy_tpu.kernels.chunked.SCORES", 1)
    got = attention(*map(jnp.asarray, arrays), placement=None, config=CHUNKED, tiles=tiles)
    assert relative_error(np.asarray(got), expected(arrays, dense_mask(window, grid, 0))) <= 1e-5


@pytest.mark.parametrize("config", [CHUNKED, pytest.param(SPLASH, marks=pytest.mark.slow)], ids=["chunked", "splash"])
def test_a_window_over_everything_is_full_attention(config: AttentionConfig) -> None:
    arrays = [jnp.asarray(array) for array in inputs(5 * 5 * 7, heads=1, batch=1)]
    tiles = make_schedule(TileWindow((2, 4, 3), (9, 9, 9)), (5, 5, 7))
    assert tiles.attended_share == 1
    got = attention(*arrays, placement=None, config=config, tiles=tiles)
    whole = attention(*arrays, placement=None, config=config)
    assert relative_error(np.asarray(got), np.asarray(whole)) <= 1e-5


def test_a_program_for_tpus_has_the_blocks_of_the_window_only() -> None:
    """A grid as of 480p, in tiles of 1,024 tokens and less; the kernel's grid has 18 of 48 key tiles."""
    tiles = make_schedule(TileWindow((4, 16, 16), (3, 3, 3)), (21, 30, 52))
    assert (len(tiles.neighbours), tiles.neighbours.shape[1], tiles.rows(128)) == (48, 18, 896)
    placement = absent_placement("tpu", "v6e", sp=4)
    array = jax.ShapeDtypeStruct((1, 8, tiles.tokens, 128), jnp.bfloat16)
    run = jax.jit(lambda *given: attention(*given, placement=placement, config=AttentionConfig(), tiles=tiles))
    text = str(jax.make_jaxpr(run)(array, array, array))
    assert "grid=(1, 2, 48, 18)" in text
    assert jax.export.export(run, platforms=["tpu"])(array, array, array).mlir_module()


def test_a_ring_is_refused() -> None:
    tiles = make_schedule(*EVEN)
    ring = AttentionConfig(implementation="chunked", sequence_parallel="ring")
    arrays = [jnp.asarray(array) for array in inputs(tiles.tokens)]
    with pytest.raises(MeshError, match="attention_window is of tiles, which need whole sequences") as caught:
        attention(*arrays, placement=cpu_placement(sp=4), config=ring, tiles=tiles)
    assert caught.value.field == "attention_window"
    with pytest.raises(MeshError, match="heads=3 a device and sp=2"):
        attention(
            *(array[:, :3] for array in arrays), placement=cpu_placement(sp=2), config=AttentionConfig(), tiles=tiles
        )


@pytest.mark.parametrize("name", ["cudnn", "hopper"])
def test_kernels_without_tiles_are_refused_by_name_and_passed_over_by_auto(name: str) -> None:
    tiles = make_schedule(*EVEN)
    placement = absent_placement("gpu", "h200")
    array = jax.ShapeDtypeStruct((1, 8, tiles.tokens, 128), jnp.bfloat16)

    def trace(implementation: str) -> str:
        config = AttentionConfig(implementation=implementation, dense_max_tokens=16)
        run = jax.jit(lambda *given: attention(*given, placement=placement, config=config, tiles=tiles))
        return str(jax.make_jaxpr(run)(array, array, array))

    assert "custom_call" not in trace("auto")
    with pytest.raises(UnsupportedError, match=f'implementation="{name}" cannot take this call'):
        trace(name)


def test_what_tiles_do_not_combine_with() -> None:
    tiles = make_schedule(*EVEN)
    arrays = [jnp.asarray(array) for array in inputs(tiles.tokens)]
    with pytest.raises(InvalidValueError, match="they combine with kv_lengths only"):
        attention(*arrays, placement=None, config=CHUNKED, tiles=tiles, is_causal=True)
    with pytest.raises(InvalidValueError, match="tiles are of 144 tokens, and attention is of 10 queries to 144 keys"):
        attention(arrays[0][:, :, :10], *arrays[1:], placement=None, config=CHUNKED, tiles=tiles)
