"""Flash attention for TPU: a forward-only Pallas kernel.

Why not an existing kernel: the splash kernel that JAX ships has no base-2 exponent, needs block masks that are built on
the host in NumPy, and has no dynamic lengths or offsets; tokamax's has the exponent, but each release pins one jax
version and has many dependencies, and this package must run beside a user's own. docs/design.md names the ideas that
this kernel shares with them.

Layout of scores: tiles are computed as k·qᵀ, [keys, queries]. The maximum and the sum over keys then run down the
sublanes, element by element, instead of across lanes, and the running maximum and sum take 8×block_query floats
instead of 128×block_query.

Layout of operands: [batch, tokens, heads × head_dim], as linear layers write and read them. A head of 128 is one
column of whole lanes there, so that nothing is transposed in memory, and the last tile of a sequence may be cut.

The exponent: log2(e)·scale is folded into q, so that each score costs one exp2 and no multiplication.

The kernel holds two forms of the softmax. The bounded form subtracts a number that is fixed before the first key:
scores leave the matrix unit, go through exp2 and return to it. The exact form follows the running maximum, for which a
whole block of scores waits: 9,570 bundles a tile instead of 6,496 on v6e (docs/design.md). Each block of queries takes
the bounded form where the norms of its queries and of the longest key show it to be safe (`start_block`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from comfy_tpu.config import BlockSizes
from comfy_tpu.kernels.masking import Band, Masking, as_bool_mask, key_bias, visible_keys
from comfy_tpu.kernels.tuning import LANES, block_sizes, vmem_limit

# Finite values in place of -inf, in an order that makes rows without any visible key come out as sum 0 instead of NaN:
# hidden scores < first running maximum < the most negative bias a caller can add (e.g. torch.finfo(float32).min).
HIDDEN = -3.0e38
_FIRST_MAXIMUM = -2.5e38
_LOWEST_BIAS = -1.0e38

_SUBLANES = 8

# The bounded form. Every score is at most the anchor + HEADROOM, and the largest score of a row at least the anchor -
# DEPTH. So no weight is over 2⁴⁰, and the sums of 10⁶ of them with values up to 2⁶⁷ (1e20) are numbers; the largest
# weight of a row is at least 2⁻⁸⁰, and weights down to 2⁻⁴⁶ of it are normal numbers in bfloat16 and float32.
HEADROOM = 40.0
DEPTH = 80.0
_PROBED_KEYS = 128
# The norms are of squares that were rounded to bfloat16: 2⁻⁹ off at most.
_NORM_MARGIN = 1.01

# The exact form takes this many queries at a time, and one row of their maxima. Bundles a tile on v5e, v5p, v6e and
# v7x, without remainders: 16,967, 17,284, 9,554 and 8,847; with all queries and eight equal rows 18,111, 18,162, 9,970
# and 9,155.
_EXACT_QUERIES = 256
# Chips whose matrix units multiply 128 deep. On the others half of the depth is empty with heads of 128, and remainders
# of the queries there cost next to nothing: 9,570 bundles a tile on v6e and 8,862 on v7x.
_SHALLOW_UNITS = ("v5e", "v5p")


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    masking: Masking,
    *,
    scale: float,
    chip: str,
    blocks: BlockSizes | None,
    interpret: bool,
    partial: bool,
    smooth_keys: bool,
) -> tuple[Array, Array | None]:
    """[B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv] -> [B, Hq, Lq, Dv].

    With `partial`, the result is float32 with log-sum-exp [B, Hq, Lq], to be merged with attentions over other keys.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    tile = block_sizes(chip, queries, keys, max(head_dim, value_dim), blocks)

    lengths = jnp.full((batch,), keys, jnp.int32)
    bias = None
    largest_bias = jnp.zeros((batch,), jnp.float32)
    if masking.lengths is not None:
        lengths = jnp.clip(masking.lengths.astype(jnp.int32), 0, keys)
    if masking.keys is not None:
        visible = as_bool_mask(masking.keys)
        # Trailing padding, the usual case of a key mask, is then skipped in whole blocks.
        last = jnp.max(jnp.where(visible, jnp.arange(1, keys + 1), 0), axis=1)
        lengths = jnp.minimum(lengths, last.astype(jnp.int32))
        added = key_bias(masking.keys)
        added = jnp.where(jnp.isneginf(added), HIDDEN, jnp.maximum(added * math.log2(math.e), _LOWEST_BIAS))
        largest_bias = jnp.max(jnp.where(visible, added, HIDDEN), axis=1)
        added = jnp.pad(added, ((0, 0), (0, -keys % tile.key)))
        # A column per key, filled to whole lanes: turning a row of lanes into a column inside the kernel is no TPU
        # instruction. 39 MB a sequence at 75,600 tokens.
        bias = jnp.broadcast_to(added[:, :, None], (*added.shape, LANES))
    offset = jnp.asarray(masking.offset, jnp.int32).reshape(1)

    query, key, value = (to_columns(array) for array in (query, key, value))
    out, logsumexp = _attend(
        query,
        key,
        value,
        visible_keys(masking, keys),
        offset,
        lengths,
        largest_bias,
        bias,
        heads=heads,
        kv_heads=kv_heads,
        scale=scale,
        smooth_keys=smooth_keys,
        tile=tile,
        shares=None,
        band=masking.band,
        may_hide=masking.lengths is not None or masking.keys is not None,
        has_float_bias=masking.keys is not None and masking.keys.dtype != jnp.bool_,
        chip=chip,
        interpret=interpret,
        partial=partial,
    )
    out = out.reshape(batch, queries, heads, -1)[..., :value_dim].transpose(0, 2, 1, 3)
    return out, logsumexp


class Shares(NamedTuple):
    """A sequence that came together from several devices: `tokens` rows of each, then rows of no meaning.

    Whole registers of each can be put together without a pass over memory: 18,900 tokens take 18,912 rows.
    """

    tokens: int
    rows: int


def splash_columns(
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    shares: Shares,
    scale: float,
    chip: str,
    blocks: BlockSizes | None,
    interpret: bool,
    smooth_keys: bool,
) -> Array:
    """Full attention of [B, L, H × D] arrays whose heads are whole lanes, among the rows that hold tokens.

    A share must have the tokens of the smallest tile (`share_tile`).
    """
    batch, rows, width = query.shape
    tile = share_tile(shares, rows // shares.rows, width // heads, chip, blocks)
    assert tile is not None
    visible = None
    if shares.rows != shares.tokens:
        visible = jnp.broadcast_to(np.arange(rows) % shares.rows < shares.tokens, (batch, rows))
    out, _ = _attend(
        query,
        key,
        value,
        visible,
        jnp.zeros((1,), jnp.int32),
        jnp.full((batch,), rows, jnp.int32),
        jnp.zeros((batch,), jnp.float32),
        None,
        heads=heads,
        kv_heads=heads,
        scale=scale,
        smooth_keys=smooth_keys,
        tile=tile,
        shares=None if visible is None else shares,
        band=Band(),
        may_hide=visible is not None,
        has_float_bias=False,
        chip=chip,
        interpret=interpret,
        partial=False,
    )
    return out


def share_tile(shares: Shares, count: int, head_dim: int, chip: str, blocks: BlockSizes | None) -> BlockSizes | None:
    """The tile for a sequence of shares: no longer than one, so that it meets the empty rows of one at most.

    None where a share is shorter than the smallest tile.
    """
    rows = count * shares.rows
    tile = block_sizes(chip, rows, rows, head_dim, blocks)
    longest = shares.tokens // LANES * LANES
    if max(tile.query, tile.key) <= longest or not longest:
        return tile if longest else None
    step = min(tile.key_compute, longest)
    return BlockSizes(query=min(tile.query, longest), key=min(tile.key, longest) // step * step, key_compute=step)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    visible: Array | None,
    offset: Array,
    lengths: Array,
    largest_bias: Array,
    bias: Array | None,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    smooth_keys: bool,
    tile: BlockSizes,
    shares: Shares | None,
    band: Band,
    may_hide: bool,
    has_float_bias: bool,
    chip: str,
    interpret: bool,
    partial: bool,
) -> tuple[Array, Array | None]:
    queries, keys, head_dim = query.shape[1], key.shape[1], query.shape[2] // heads
    center, longest = measure_keys(key, kv_heads, visible, smooth=smooth_keys)
    moved = None
    if key.dtype == jnp.float32 and smooth_keys:
        # Scores of keys that are far from zero would lose the digits in which they differ. In bfloat16 the keys have
        # lost them already, and the pass is saved.
        key, center, moved = key - center[:, :1], jnp.zeros_like(center), center[:, 0]
    out, logsumexp = _call(
        offset,
        lengths,
        longest.reshape(-1),
        largest_bias,
        _pad_rows(query, tile.query),
        _pad_rows(key, tile.key),
        _pad_rows(value, tile.key),
        center,
        bias,
        heads=heads,
        kv_heads=kv_heads,
        factor=scale * math.log2(math.e),
        queries=queries,
        tile=tile,
        shares=shares,
        band=band,
        # Without any of these no score is ever hidden, and the kernel carries no code to hide it.
        may_hide=may_hide or keys % tile.key != 0,
        has_float_bias=has_float_bias,
        has_remainders=query.dtype == jnp.bfloat16 and head_dim == LANES and chip not in _SHALLOW_UNITS,
        vmem_limit_bytes=vmem_limit(chip),
        interpret=interpret,
        partial=partial,
    )
    if logsumexp is None:
        return out[:, :queries], None
    logsumexp = logsumexp[:, :, 0, :queries]
    if moved is not None:
        by_head = query.reshape(*query.shape[:2], kv_heads, heads // kv_heads, -1)
        shift = jnp.einsum("blkgd,bkd->bkgl", by_head, moved.reshape(moved.shape[0], kv_heads, -1), precision="highest")
        logsumexp += scale * shift.reshape(logsumexp.shape)
    return out[:, :queries], logsumexp


def to_columns(array: Array) -> Array:
    """[B, H, L, D] -> [B, L, H × D], each head filled with zeros to whole lanes: they add nothing to a product."""
    array = jnp.pad(array.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, 0), (0, -array.shape[3] % LANES)))
    return array.reshape(*array.shape[:2], -1)


def _pad_rows(array: Array, rows: int) -> Array:
    """Adds rows of zeros to a sequence that is shorter than one tile."""
    return jnp.pad(array, ((0, 0), (0, max(0, rows - array.shape[1])), (0, 0)))


def measure_keys(key: Array, heads: int, visible: Array | None, *, smooth: bool) -> tuple[Array, Array]:
    """[B, L, H × D], bool [B, L] -> a point among the visible keys of each head, the largest distance of one from it.

    The point is [B, 8, H × D], in eight equal rows; the distance is float32 [B, H].

    A softmax does not change when all scores of a row move by the same amount, so the bounds of a score need to count
    from the middle of the keys only, which may be far from zero ("K-smoothing"). Any point gives true bounds: the mean
    of about a thousand keys is near enough to that of all, and is not another pass over them. Not `smooth`: zero.
    """
    batch, keys, width = key.shape
    center = jnp.zeros((batch, 1, width), key.dtype)
    if smooth:
        stride = max(1, keys // 1024)
        sample = key[:, ::stride].astype(jnp.float32)
        shown = jnp.ones((batch, sample.shape[1], 1), bool) if visible is None else visible[:, ::stride, None]
        count = jnp.maximum(jnp.sum(shown, axis=1, keepdims=True), 1)
        center = (jnp.sum(jnp.where(shown, sample, 0.0), axis=1, keepdims=True) / count).astype(key.dtype)
    squares = jnp.square(key.astype(jnp.float32) - center.astype(jnp.float32)).astype(key.dtype)
    # The sum over each head's columns as a product: heads as a dimension of their own would be another layout.
    belongs = np.repeat(np.eye(heads, dtype=np.float32), width // heads, axis=0)
    distances = jnp.einsum(
        "blc,ch->blh",
        squares,
        jnp.asarray(belongs, key.dtype),
        precision=_precision(key.dtype),
        preferred_element_type=jnp.float32,
    )
    if visible is not None:
        distances = jnp.where(visible[:, :, None], distances, 0.0)
    return jnp.broadcast_to(center, (batch, _SUBLANES, width)), jnp.sqrt(jnp.max(distances, axis=1))


def _call(
    offset: Array,
    lengths: Array,
    longest: Array,
    largest_bias: Array,
    query: Array,
    key: Array,
    value: Array,
    center: Array,
    bias: Array | None,
    *,
    heads: int,
    kv_heads: int,
    factor: float,
    queries: int,
    tile: BlockSizes,
    shares: Shares | None,
    band: Band,
    may_hide: bool,
    has_float_bias: bool,
    has_remainders: bool,
    vmem_limit_bytes: int,
    interpret: bool,
    partial: bool,
) -> tuple[Array, Array | None]:
    """`factor`: what each score is multiplied by before its exp2. `queries`: how many of the rows count.

    `has_remainders`: the exact form also multiplies what queries times the factor lose where they are rounded to
    bfloat16, in the empty half of units 256 deep. Without that, scores in the thousands are whole units off.
    """
    batch, rows, _ = query.shape
    keys = value.shape[1]
    head_dim, value_dim = query.shape[2] // heads, value.shape[2] // kv_heads
    group = heads // kv_heads
    query_blocks, key_blocks = pl.cdiv(rows, tile.query), pl.cdiv(keys, tile.key)
    # A window meets only this many key blocks, wherever its query block starts: the grid is no wider.
    width = key_blocks
    if band.left is not None and band.right is not None:
        width = min(key_blocks, (tile.query + band.left + band.right - 2) // tile.key + 2)

    scores = batch * heads * query_blocks * tile.query * width * tile.key  # all of the last tile is computed, too

    def key_block(b: Array, i: Array, j: Array, offset: Array, lengths: Array, *_: Array) -> Array:
        first, end = _block_range(i, offset[0], lengths[b], tile, band)
        # Steps past the end name the last block again: Pallas fetches a block only when its index changes.
        return jnp.clip(first + j, 0, jnp.maximum(end - 1, 0))

    def query_index(b: Array, h: Array, i: Array, j: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, i, h

    def key_index(b: Array, h: Array, i: Array, j: Array, *scalars: Array) -> tuple[Array | int, ...]:
        return b, key_block(b, i, j, *scalars), lax.div(h, group)

    def center_index(b: Array, h: Array, i: Array, j: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, 0, lax.div(h, group)

    def bias_index(b: Array, h: Array, i: Array, j: Array, *scalars: Array) -> tuple[Array | int, ...]:
        return b, key_block(b, i, j, *scalars), 0

    def logsumexp_index(b: Array, h: Array, i: Array, j: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, h, 0, i

    in_specs = [
        pl.BlockSpec((None, tile.query, head_dim), query_index),
        pl.BlockSpec((None, tile.key, head_dim), key_index),
        pl.BlockSpec((None, tile.key, value_dim), key_index),
        pl.BlockSpec((None, _SUBLANES, head_dim), center_index),
    ]
    operands = [query, key, value, center]
    if bias is not None:
        in_specs.append(pl.BlockSpec((None, tile.key, LANES), bias_index))
        operands.append(bias)
    out_specs = [pl.BlockSpec((None, tile.query, value_dim), query_index)]
    out_shape = [jax.ShapeDtypeStruct((batch, rows, heads * value_dim), jnp.float32 if partial else query.dtype)]
    if partial:
        out_specs.append(pl.BlockSpec((None, None, 1, tile.query), logsumexp_index))
        out_shape.append(jax.ShapeDtypeStruct((batch, heads, 1, rows), jnp.float32))

    kernel = functools.partial(
        _kernel,
        factor=factor,
        queries=queries,
        tile=tile,
        shares=shares,
        band=band,
        may_hide=may_hide or not band.is_full,
        has_bias=bias is not None,
        has_float_bias=has_float_bias,
        group=group,
        partial=partial,
    )
    results = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, heads, query_blocks, width),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((tile.query, (1 + has_remainders) * head_dim), query.dtype),
                *state_shapes(tile.query, value_dim),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        # XLA cannot look inside; without this its scheduler takes the kernel for free and hides no transfer behind it.
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (head_dim + value_dim),
            transcendentals=scores,
            bytes_accessed=query.dtype.itemsize
            * (2 * query.size + query_blocks * batch * heads * width * tile.key * (head_dim + value_dim)),
        ),
        interpret=interpret,
        name="comfy_tpu_splash",
    )(offset, lengths, longest, largest_bias, *operands)
    return results[0], results[1] if partial else None


def _block_range(i: Array, offset: Array, length: Array, tile: BlockSizes, band: Band) -> tuple[Array | int, Array]:
    """First key block that query block i needs, and the one after its last; one rule for fetching and computing."""
    top = offset + i * tile.query
    first: Array | int = 0
    end = length
    if band.left is not None:
        first = lax.div(jnp.maximum(top - band.left, 0), tile.key)
    if band.right is not None:
        end = jnp.minimum(end, top + tile.query + band.right)
    return first, lax.div(jnp.maximum(end, 0) + (tile.key - 1), tile.key)


def _kernel(
    offset_ref: Any,
    lengths_ref: Any,
    longest_ref: Any,
    largest_bias_ref: Any,
    *refs: Any,
    factor: float,
    queries: int,
    tile: BlockSizes,
    shares: Shares | None,
    band: Band,
    may_hide: bool,
    has_bias: bool,
    has_float_bias: bool,
    group: int,
    partial: bool,
) -> None:
    given_ref, key_ref, value_ref, center_ref = refs[:4]
    bias_ref = refs[4] if has_bias else None
    out_ref = refs[4 + has_bias]
    logsumexp_ref = refs[5 + has_bias] if partial else None
    query_ref, state = refs[-5], State(*refs[-4:])

    b, h, i, j = (pl.program_id(axis) for axis in range(4))
    offset, length = offset_ref[0], lengths_ref[b]
    first, end = _block_range(i, offset, length, tile, band)
    column = first + j
    top = offset + i * tile.query
    left = column * tile.key

    def gap(row: Array) -> tuple[Array | int, Array | int]:
        """The first empty row at or after `row`, and the one after the last."""
        if shares is None:
            return queries, queries
        share = lax.div(row, shares.rows) * shares.rows
        return share + shares.tokens, share + shares.rows

    gap_start, gap_end = gap(left)

    def shown(shape: tuple[int, ...], start: int) -> Array:
        rows = left + start + lax.broadcasted_iota(jnp.int32, shape, 0)
        inside = rows < length
        return inside if shares is None else inside & ((rows < gap_start) | (rows >= gap_end))

    def hide(scores: Array, start: int) -> Array:
        if not band.is_full:
            keys = left + start + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            distance = keys - (top + lax.broadcasted_iota(jnp.int32, scores.shape, 1))
            near = distance >= -band.left if band.left is not None else distance <= band.right
            if band.left is not None and band.right is not None:
                near &= distance <= band.right
            scores = jnp.where(near, scores, HIDDEN)
        # One number for a row of scores, and one addition for each: 7,336 bundles a tile with a comparison for each.
        penalty = jnp.where(shown((scores.shape[0], LANES), start), 0.0, HIDDEN)
        return scores + jnp.tile(penalty, (1, scores.shape[1] // LANES))

    def clear(values: Array, start: int) -> Array:
        return jnp.where(shown(values.shape, start), values, jnp.zeros_like(values))

    hiding = Hiding(hide, clear)

    @pl.when(j == 0)
    def _start() -> None:
        scaled = given_ref[...].astype(jnp.float32) * factor
        if queries % tile.query or shares is not None:  # rows without a query must not choose the form
            rows = i * tile.query + lax.broadcasted_iota(jnp.int32, scaled.shape, 0)
            start, end = gap(i * tile.query)
            scaled = jnp.where((rows < start) | ((rows >= end) & (rows < queries)), scaled, 0.0)
        rounded = scaled.astype(query_ref.dtype)
        head_dim = rounded.shape[1]
        query_ref[:, :head_dim] = rounded
        if query_ref.shape[1] > head_dim:
            query_ref[:, head_dim:] = (scaled - rounded.astype(jnp.float32)).astype(query_ref.dtype)
        kv_head = b * (pl.num_programs(1) // group) + lax.div(h, group)
        start_block(
            query_ref,
            key_ref,
            center_ref,
            bias_ref,
            state,
            longest=longest_ref[kv_head],
            largest_bias=largest_bias_ref[b],
            has_float_bias=has_float_bias,
            hiding=hiding if may_hide else None,
        )

    def visit(hiding: Hiding | None) -> None:
        visit_block(query_ref, key_ref, value_ref, bias_ref, state, tile=tile, hiding=hiding)

    if may_hide:
        runs = column < end
        # Only blocks that the length or the band cuts through pay for comparing positions.
        clean_end = length if shares is None else jnp.minimum(length, gap_start)
        cut = left + tile.key > clean_end
        if band.left is not None:
            cut |= left < top + tile.query - 1 - band.left
        if band.right is not None:
            cut |= left + tile.key - 1 > top + band.right
        pl.when(runs & cut)(functools.partial(visit, hiding))
        pl.when(runs & ~cut)(functools.partial(visit, None))
    else:
        visit(None)

    pl.when(j == pl.num_programs(3) - 1)(lambda: finish_block(out_ref, logsumexp_ref, state))


class Hiding(NamedTuple):
    """What a block does about keys that are not seen; both are given the first row of theirs in the block."""

    hide: Callable[[Array, int], Array]
    """Scores [keys, queries] with hidden ones."""
    clear: Callable[[Array, int], Array] | None
    """Keys or values with zeros where there may be anything: NaN plus a number, or times a weight of 0, is NaN."""


class State(NamedTuple):
    """Memory that a block of queries keeps from one block of keys to the next."""

    is_bounded: Any
    """int32 [1]: whether this block takes the bounded form."""
    maximum: Any
    """float32 [8, queries]: the running maximum, or the bounded form's anchor."""
    weight: Any
    """float32 [8, queries]"""
    total: Any
    """float32 [value_dim, queries]: the weighted sum of values."""


def state_shapes(rows: int, value_dim: int) -> list[Any]:
    """The memory of a State."""
    return [
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((_SUBLANES, rows), jnp.float32),
        pltpu.VMEM((_SUBLANES, rows), jnp.float32),
        pltpu.VMEM((value_dim, rows), jnp.float32),
    ]


def start_block(
    query_ref: Any,
    key_ref: Any,
    center_ref: Any,
    bias_ref: Any,
    state: State,
    *,
    longest: Array,
    largest_bias: Array | float,
    has_float_bias: bool,
    hiding: Hiding | None,
) -> None:
    """Sets the state of a block of queries before its first keys, and chooses the form.

    With c the center and `longest` the largest |k - c|, a score is within |q|·longest of q·c (Cauchy and Schwarz), so
    the largest score of a row is in [q·c - |q|·longest, q·c + |q|·longest + largest_bias]. It is also no less than the
    row's scores with the first keys, which narrows the range: a typical row may then have a bound over 100. The bounded
    form is safe where the range is at most HEADROOM + DEPTH for every row: the anchor is HEADROOM below its upper end,
    or higher where a score was seen there. A number that is not finite makes the comparison false, and the exact form
    carries it to the result.
    """
    state.weight[...] = jnp.zeros_like(state.weight)
    state.total[...] = jnp.zeros_like(state.total)
    query = query_ref[:, : key_ref.shape[1]]
    squares = jnp.square(query.astype(jnp.float32)).astype(query.dtype)
    norm = jnp.sqrt(_dot(jnp.ones((_SUBLANES, squares.shape[1]), squares.dtype), squares, 1, 1))
    reach = norm * (longest * _NORM_MARGIN)
    middle = _dot(center_ref[...], query, 1, 1)
    scores = _scores(query, key_ref, bias_ref, slice(0, _PROBED_KEYS), hiding)
    lowest = jnp.max(scores, axis=0, keepdims=True)
    # A row may see none of the first keys. With a float bias, the keys that it sees may have any.
    lowest = jnp.broadcast_to(lowest, reach.shape) if has_float_bias else jnp.maximum(lowest, middle - reach)
    highest = middle + reach + largest_bias
    is_safe = jnp.min((highest - lowest <= HEADROOM + DEPTH).astype(jnp.float32)) > 0.0
    state.is_bounded[0] = is_safe.astype(jnp.int32)
    state.maximum[...] = jnp.where(is_safe, jnp.maximum(lowest, highest - HEADROOM), _FIRST_MAXIMUM)


def visit_block(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    bias_ref: Any,
    state: State,
    *,
    tile: BlockSizes,
    hiding: Hiding | None,
) -> None:
    """Adds a block of keys to the state.

    Behind the columns of `query_ref` that a key has there may be the remainders of the same, for the exact form.
    """
    is_bounded = state.is_bounded[0] == 1
    forms = (
        (_add_bounded, is_bounded, key_ref.shape[1]),
        (_add_exact, jnp.logical_not(is_bounded), query_ref.shape[1]),
    )
    for form, chosen, columns in forms:

        @pl.when(chosen)
        def _visit(form: Any = form, columns: int = columns) -> None:
            for start in range(0, tile.key, tile.key_compute):
                rows = slice(start, min(start + tile.key_compute, tile.key))
                scores = _scores(query_ref[:, :columns], key_ref, bias_ref, rows, hiding)
                form(scores, _read_rows(value_ref, rows, hiding), state)


def _add_bounded(scores: Array, values: Array, state: State) -> None:
    weights = jnp.exp2(scores - state.maximum[:1])
    state.weight[...] += jnp.sum(weights, axis=0, keepdims=True)
    state.total[...] += _dot(values, weights.astype(values.dtype), 0, 0)


def _add_exact(scores: Array, values: Array, state: State) -> None:
    for start in range(0, scores.shape[1], _EXACT_QUERIES):
        _add_exact_part(scores[:, start : start + _EXACT_QUERIES], values, state, slice(start, start + _EXACT_QUERIES))


def _add_exact_part(scores: Array, values: Array, state: State, queries: slice) -> None:
    before = state.maximum[:1, queries]
    after = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
    weights = jnp.exp2(scores - after)
    added = _dot(values, weights.astype(values.dtype), 0, 0)
    shrink = jnp.exp2(before - after)
    state.total[:, queries] = shrink * state.total[:, queries] + added
    state.weight[:, queries] = shrink * state.weight[:, queries] + jnp.sum(weights, axis=0, keepdims=True)
    state.maximum[:, queries] = jnp.broadcast_to(after, (_SUBLANES, after.shape[1]))


def _scores(query: Array, key_ref: Any, bias_ref: Any, rows: slice, hiding: Hiding | None) -> Array:
    """Scores of all queries with some keys of the block, [keys, queries]; remainders of queries meet the same keys."""
    keys = _read_rows(key_ref, rows, hiding)
    if query.shape[1] > keys.shape[1]:
        keys = jnp.concatenate((keys, keys), axis=1)
    scores = _dot(keys, query, 1, 1)
    if bias_ref is not None:
        scores += jnp.tile(bias_ref[rows, :], (1, scores.shape[1] // LANES))
    return scores if hiding is None else hiding.hide(scores, rows.start)


def _read_rows(ref: Any, rows: slice, hiding: Hiding | None) -> Array:
    values = ref[rows, :]
    return values if hiding is None or hiding.clear is None else hiding.clear(values, rows.start)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=_precision(left.dtype),
        preferred_element_type=jnp.float32,
    )


def _precision(dtype: Any) -> lax.Precision:
    # float32 stays float32: the MXU's default would round both sides to bfloat16.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def finish_block(out_ref: Any, logsumexp_ref: Any, state: State) -> None:
    """Writes the result of a block of queries after its last keys."""
    weight = state.weight[:1]
    # No visible key: torch returns zeros, and a ring merges the row with weight 0. Not `weight > 0`, which is also
    # false for NaN.
    empty = weight == 0.0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, weight))
    out_ref[...] = jnp.transpose(state.total[...] * inverse).astype(out_ref.dtype)
    if logsumexp_ref is not None:
        natural = math.log(2.0) * (state.maximum[:1] + jnp.log2(jnp.where(empty, 1.0, weight)))
        logsumexp_ref[...] = jnp.where(empty, -jnp.inf, natural)
