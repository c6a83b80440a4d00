"""Sliding tile attention: video tokens attend to the tiles around their own and to the text, text tokens to all.

Tokens are brought into the order of tiles, so that what a tile of queries attends to is a list of whole tiles of keys,
known when the program is made: the splash kernel fetches those blocks only, plain JAX gathers them. No mask is made.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from comfy_tpu.config import BlockSizes
from comfy_tpu.kernels import chunked, masking, splash
from comfy_tpu.kernels.masking import Masking
from comfy_tpu.kernels.tuning import LANES, MIB, vmem_limit
from comfy_tpu.kernels.windows import TileSchedule

SPLASH_TILE_TOKENS = 4096
"""The largest tile of the splash kernel: queries and sums of 4,096 rows, with 8 MiB of scores, are about 24 MiB."""
_SCORE_BYTES = 8 * MIB


def chunked_tiles(
    query: Array, key: Array, value: Array, schedule: TileSchedule, lengths: Array | None, *, scale: float
) -> Array:
    """[B, Hq, L, D], [B, Hkv, L, D], [B, Hkv, L, Dv] -> [B, Hq, L, Dv], in plain JAX.

    The first `schedule.tokens` of L are the video's, the others text. `lengths` [B]: keys from there on are hidden.
    """
    batch, heads, _, _ = query.shape
    kv_heads, _, value_dim = value.shape[1:]
    tokens, rows, tiles = schedule.tokens, schedule.rows(), len(schedule.neighbours)
    keys, values, queries = (_to_tiles(array, schedule, rows) for array in (key, value, query))
    queries = queries.reshape(batch, kv_heads, heads // kv_heads, tiles, rows, -1)
    text_key, text_value = key[:, :, tokens:], value[:, :, tokens:]
    visible = None
    if lengths is not None or not schedule.is_even:
        inside = np.arange(rows) < schedule.sizes[:, None]
        visible = jnp.broadcast_to(inside, (batch, tiles, rows))
        if lengths is not None:
            visible &= schedule.padded_tokens() < lengths[:, None, None]
    text = Masking(lengths=None if lengths is None else lengths - tokens)

    def attend(given: tuple[Array, Array]) -> Array:
        part, seen = given

        def add(state: Any, which: Array) -> Any:
            near_key, near_value = (
                jnp.take(array, which, axis=2, mode="clip").reshape(batch, kv_heads, -1, array.shape[-1])
                for array in (keys, values)
            )
            shown = None if visible is None else jnp.take(visible, which, axis=1, mode="clip").reshape(batch, -1)
            return chunked.update(state, part, near_key, near_value, Masking(keys=shown), scale, 0, 0, 0)

        state = chunked.start(part, value_dim)
        if batch * heads * rows * rows * seen.shape[0] <= chunked.SCORES:
            state = add(state, seen)
        else:
            state = lax.fori_loop(
                0, seen.shape[0], lambda i, state: add(state, lax.dynamic_slice(seen, (i,), (1,))), state
            )
        if text_key.shape[2]:
            state = chunked.update(state, part, text_key, text_value, text, scale, 0, 0, 0)
        return chunked.finish(state)[0].astype(query.dtype)

    made = lax.map(attend, (jnp.moveaxis(queries, 3, 0), jnp.asarray(schedule.neighbours)))
    made = jnp.moveaxis(made, 0, 3).reshape(batch, heads, tiles, rows, value_dim)
    return _from_tiles(made, schedule)


def splash_tiles(
    query: Array,
    key: Array,
    value: Array,
    schedule: TileSchedule,
    lengths: Array | None,
    *,
    scale: float,
    chip: str,
    interpret: bool,
    smooth_keys: bool,
) -> Array:
    """As `chunked_tiles`, by the splash kernel: a block is a tile, padded to whole lanes. Video tokens only."""
    batch, heads, total, _ = query.shape
    kv_heads, _, value_dim = value.shape[1:]
    tokens, rows, tiles = schedule.tokens, schedule.rows(LANES), len(schedule.neighbours)
    text_blocks = -(-(total - tokens) // rows)
    query = (query.astype(jnp.float32) * (scale * math.log2(math.e))).astype(query.dtype)
    if lengths is not None:  # a weight of 0 times NaN is NaN
        value = jnp.where(jnp.arange(total)[:, None] < lengths[:, None, None, None], value, 0)
    visible = masking.visible_keys(Masking(lengths=lengths), total)
    center, longest = splash.measure_keys(splash.to_columns(key), kv_heads, visible, smooth=smooth_keys)

    def blocks(array: Array, with_text: bool) -> Array:
        made = _to_tiles(array, schedule, rows).reshape(batch, array.shape[1], tiles * rows, -1)
        if with_text and text_blocks:
            made = jnp.concatenate((made, _pad(array[:, :, tokens:], rows, 1)), axis=2)
        return _pad(made, rows, LANES)

    ends = jnp.full((batch,), total, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    ids = schedule.padded_tokens(LANES)
    inside = np.arange(rows) < schedule.sizes[:, None]
    counts = jnp.sum(inside & (ids < ends[:, None, None]), axis=2)
    if text_blocks:
        starts = tokens + rows * np.arange(text_blocks)
        counts = jnp.concatenate((counts, jnp.clip(ends[:, None] - starts, 0, rows)), axis=1)
    texts = np.broadcast_to(tiles + np.arange(text_blocks), (tiles, text_blocks))
    table = np.concatenate((schedule.neighbours, texts), axis=1).astype(np.int32)
    out = _call(
        jnp.asarray(table.reshape(-1)),
        counts.astype(jnp.int32).reshape(-1),
        longest.reshape(-1),
        blocks(query, False),
        blocks(key, True),
        blocks(value, True),
        center,
        width=table.shape[1],
        rows=rows,
        may_hide=lengths is not None or bool((schedule.sizes < rows).any()) or bool((total - tokens) % rows),
        vmem_limit_bytes=vmem_limit(chip),
        interpret=interpret,
    )
    made = out[..., :value_dim].reshape(batch, heads, tiles, rows, value_dim)
    return _from_tiles(made, schedule, LANES)


def _pad(array: Array, rows: int, columns: int) -> Array:
    """[B, H, L, D] padded with zeros to multiples of `rows` and `columns`."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % rows), (0, -array.shape[3] % columns)))


def _to_tiles(array: Array, schedule: TileSchedule, rows: int) -> Array:
    """[B, H, L, D] -> the video's tokens by tiles, [B, H, tiles, rows, D]."""
    batch, heads, _, width = array.shape
    video = array[:, :, : schedule.tokens]
    if not schedule.is_even:
        order = schedule.padded_tokens()
        order = np.pad(order, ((0, 0), (0, rows - order.shape[1])))
        return jnp.take(video, order.reshape(-1), axis=2, mode="clip").reshape(batch, heads, len(order), rows, width)
    # A transposition, which is one pass over the memory; a gather is made row by row.
    (a, b, c), (x, y, z) = schedule.counts, schedule.largest
    made = video.reshape(batch, heads, a, x, b, y, c, z, width).transpose(0, 1, 2, 4, 6, 3, 5, 7, 8)
    made = made.reshape(batch, heads, a * b * c, x * y * z, width)
    return jnp.pad(made, ((0, 0), (0, 0), (0, 0), (0, rows - x * y * z), (0, 0)))


def _from_tiles(array: Array, schedule: TileSchedule, multiple: int = 1) -> Array:
    """The reverse of `_to_tiles`: [B, H, tiles, rows, D] -> [B, H, tokens, D]."""
    batch, heads, _, _, width = array.shape
    if not schedule.is_even:
        flat = array.reshape(batch, heads, -1, width)
        return jnp.take(flat, schedule.positions(multiple), axis=2, mode="clip")
    (a, b, c), (x, y, z) = schedule.counts, schedule.largest
    made = array[:, :, :, : x * y * z].reshape(batch, heads, a, b, c, x, y, z, width)
    return made.transpose(0, 1, 2, 5, 3, 6, 4, 7, 8).reshape(batch, heads, schedule.tokens, width)


def _call(
    table: Array,
    counts: Array,
    longest: Array,
    query: Array,
    key: Array,
    value: Array,
    center: Array,
    *,
    width: int,
    rows: int,
    may_hide: bool,
    vmem_limit_bytes: int,
    interpret: bool,
) -> Array:
    """`table`: the key blocks of each query block, `width` each; `counts`: keys of each block that are not hidden, by
    batch and block; `center`, `longest`: as of `splash.measure_keys`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    group, key_blocks = heads // kv_heads, keys // rows
    tile = BlockSizes(query=rows, key=rows, key_compute=_key_compute(rows))
    scores = batch * heads * queries * width * rows

    def query_index(b: Array, h: Array, i: Array, j: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, h, i, 0

    def key_index(b: Array, h: Array, i: Array, j: Array, table: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, lax.div(h, group), table[i * width + j], 0

    def center_index(b: Array, h: Array, i: Array, j: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, 0, lax.div(h, group)

    def kernel(table_ref: Any, counts_ref: Any, longest_ref: Any, *refs: Any) -> None:
        query_ref, key_ref, value_ref, center_ref, out_ref = refs[:5]
        state = splash.State(*refs[5:])
        b, h, i, j = (pl.program_id(axis) for axis in range(4))
        count = counts_ref[b * key_blocks + table_ref[i * width + j]]

        def hide(limit: Array, scores: Array, start: int) -> Array:
            shown = start + lax.broadcasted_iota(jnp.int32, scores.shape, 0) < limit
            return jnp.where(shown, scores, splash.HIDDEN)

        hiding = splash.Hiding(functools.partial(hide, count), None)

        def visit(hiding: splash.Hiding | None) -> None:
            splash.visit_block(query_ref, key_ref, value_ref, None, state, tile=tile, hiding=hiding)

        @pl.when(j == 0)
        def _start() -> None:
            splash.start_block(
                query_ref,
                key_ref,
                center_ref,
                None,
                state,
                longest=longest_ref[b * kv_heads + lax.div(h, group)],
                largest_bias=0.0,
                has_float_bias=False,
                hiding=hiding if may_hide else None,
            )

        if may_hide:
            pl.when((count > 0) & (count < rows))(functools.partial(visit, hiding))
            pl.when(count == rows)(functools.partial(visit, None))
        else:
            visit(None)
        pl.when(j == pl.num_programs(3) - 1)(lambda: splash.finish_block(out_ref, None, state))

    made: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, heads, queries, value_dim), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, queries // rows, width),
            in_specs=[
                pl.BlockSpec((None, None, rows, head_dim), query_index),
                pl.BlockSpec((None, None, rows, head_dim), key_index),
                pl.BlockSpec((None, None, rows, value_dim), key_index),
                pl.BlockSpec((None, center.shape[1], head_dim), center_index),
            ],
            out_specs=pl.BlockSpec((None, None, rows, value_dim), query_index),
            scratch_shapes=splash.state_shapes(rows, value_dim),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (head_dim + value_dim),
            transcendentals=scores,
            bytes_accessed=query.dtype.itemsize
            * (2 * query.size + (queries // rows) * batch * heads * width * rows * (head_dim + value_dim)),
        ),
        interpret=interpret,
        name="comfy_tpu_splash_tiles",
    )(table, counts, longest, query, key, value, center)
    return made


def _key_compute(rows: int) -> int:
    """The most keys computed at a time whose scores fit: a divisor of a tile's rows in whole lanes."""
    steps = rows // LANES
    fits = [LANES * n for n in range(1, steps + 1) if steps % n == 0 and LANES * n * rows * 4 <= _SCORE_BYTES]
    return max(fits, default=math.gcd(rows, LANES))
