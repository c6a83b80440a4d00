"""Attention in plain JAX: whole for short sequences, in chunks with an online softmax for long ones.

The reference for the other kernels, what CPUs run, and the fallback everywhere for dense masks. Forward only: the loops
over chunks have bounds that depend on data, which reverse-mode differentiation does not follow.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from comfy_tpu.kernels.masking import Masking, key_bias

SCORES = 1 << 23
"""Scores held at once, over batch and heads: 32 MiB of float32."""
_KEY_CHUNK = 1024
_QUERY_CHUNKS = (1024, 512, 256, 128)


class State(NamedTuple):
    """Online softmax of a chunk of queries: float32 [B, Hkv, G, Lq] and [B, Hkv, G, Lq, Dv]."""

    maximum: Array
    weight: Array
    total: Array


def chunked_attention(
    query: Array, key: Array, value: Array, masking: Masking, *, scale: float, single_chunk: bool
) -> tuple[Array, Array]:
    """[B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv] -> float32 [B, Hq, Lq, Dv] and log-sum-exp [B, Hq, Lq].

    `single_chunk` makes the whole score array at once.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, _, value_dim = value.shape[1:]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    if single_chunk:
        state = start(grouped, value_dim)
        out, logsumexp = finish(update(state, grouped, key, value, masking, scale, 0, 0, 0))
    else:
        out, logsumexp = _attend_in_chunks(grouped, key, value, masking, scale)
    return out.reshape(batch, heads, queries, value_dim), logsumexp.reshape(batch, heads, queries)


def _attend_in_chunks(grouped: Array, key: Array, value: Array, masking: Masking, scale: float) -> tuple[Array, Array]:
    batch, kv_heads, group, queries, _ = grouped.shape
    keys, value_dim = value.shape[2:]
    key_chunk = min(keys, _KEY_CHUNK)
    room = SCORES // (batch * kv_heads * group * key_chunk)
    query_chunk = min(queries, next((size for size in _QUERY_CHUNKS if size <= room), _QUERY_CHUNKS[-1]))
    wide = jnp.promote_types(grouped.dtype, jnp.float32)

    # Nothing is padded to whole chunks (that would copy a caller's dense mask): the last chunk starts earlier. Its
    # queries are simply computed again; its keys that were seen before are hidden by `fresh`.
    def query_step(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        row = jnp.minimum(i * query_chunk, queries - query_chunk)
        part = lax.dynamic_slice_in_dim(grouped, row, query_chunk, axis=3)

        def key_step(j: Array, state: State) -> State:
            fresh = j * key_chunk
            column = jnp.minimum(fresh, keys - key_chunk)
            key_part = lax.dynamic_slice_in_dim(key, column, key_chunk, axis=2)
            value_part = lax.dynamic_slice_in_dim(value, column, key_chunk, axis=2)
            return update(state, part, key_part, value_part, masking, scale, row, column, fresh)

        first, end = _chunk_range(masking, row, query_chunk, keys, key_chunk)
        out, logsumexp = finish(lax.fori_loop(first, end, key_step, start(part, value_dim)))
        return (
            lax.dynamic_update_slice_in_dim(results[0], out, row, axis=3),
            lax.dynamic_update_slice_in_dim(results[1], logsumexp, row, axis=3),
        )

    shape = (batch, kv_heads, group, queries)
    empty = (jnp.zeros((*shape, value_dim), wide), jnp.zeros(shape, wide))
    return lax.fori_loop(0, -(-queries // query_chunk), query_step, empty)


def _chunk_range(
    masking: Masking, row: Array, query_chunk: int, keys: int, key_chunk: int
) -> tuple[Array | int, Array | int]:
    """Key chunks that any of the queries row … row + query_chunk sees; the others are never computed."""
    top = masking.offset + row
    first: Array | int = 0
    end: Array | int = keys
    if masking.band.left is not None:
        first = jnp.maximum(top - masking.band.left, 0) // key_chunk
    if masking.band.right is not None:
        end = jnp.minimum(end, top + query_chunk + masking.band.right)
    if masking.lengths is not None:
        end = jnp.minimum(end, jnp.max(masking.lengths))
    if isinstance(end, int):
        return first, -(-end // key_chunk)
    return jnp.asarray(first, jnp.int32), ((jnp.maximum(end, 0) + key_chunk - 1) // key_chunk).astype(jnp.int32)


def start(grouped: Array, value_dim: int) -> State:
    """The state before any key."""
    rows = grouped.shape[:-1]
    wide = jnp.promote_types(grouped.dtype, jnp.float32)
    return State(jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide), jnp.zeros((*rows, value_dim), wide))


def update(
    state: State,
    grouped: Array,
    key: Array,
    value: Array,
    masking: Masking,
    scale: float,
    row: Array | int,
    column: Array | int,
    fresh: Array | int,
) -> State:
    """Adds keys `column` … to the softmax of queries `row` …; keys before `fresh` are hidden."""
    wide = state.total.dtype
    # float32 stays float32: the default of TPUs and newer GPUs rounds it to bfloat16 or TF32.
    precision = lax.Precision.HIGHEST if grouped.dtype == wide else lax.Precision.DEFAULT
    # [B, Hkv, G, Lq, D] · [B, Hkv, Lk, D] -> [B, Hkv, G, Lq, Lk]
    scores = scale * lax.dot_general(
        grouped, key, (((4,), (3,)), ((0, 1), (0, 1))), precision=precision, preferred_element_type=wide
    )
    scores = _hide(scores, masking, row, column, fresh)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
    # A row that has seen no key has maximum -inf, and -inf - -inf is NaN: exp(-inf - 0) is the 0 that is meant.
    anchor = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = jnp.exp(scores - anchor[..., None])
    shrink = jnp.exp(state.maximum - anchor)
    # [B, Hkv, G, Lq, Lk] · [B, Hkv, Lk, Dv] -> [B, Hkv, G, Lq, Dv]
    product = lax.dot_general(
        weights.astype(value.dtype),
        value,
        (((4,), (2,)), ((0, 1), (0, 1))),
        precision=precision,
        preferred_element_type=wide,
    )
    return State(
        maximum,
        state.weight * shrink + jnp.sum(weights, axis=-1),
        state.total * shrink[..., None] + product,
    )


def _hide(scores: Array, masking: Masking, row: Array | int, column: Array | int, fresh: Array | int) -> Array:
    _, kv_heads, group, queries, keys = scores.shape
    positions = column + jnp.arange(keys)
    if masking.keys is not None:
        part = key_bias(lax.dynamic_slice_in_dim(masking.keys, column, keys, axis=1))
        scores += part[:, None, None, None, :]
    if masking.dense is not None:
        part = masking.dense
        part = lax.dynamic_slice_in_dim(part, row, queries, axis=2) if part.shape[2] > 1 else part
        part = lax.dynamic_slice_in_dim(part, column, keys, axis=3) if part.shape[3] > 1 else part
        head_shape = (1, 1) if part.shape[1] == 1 else (kv_heads, group)
        part = part.reshape(part.shape[0], *head_shape, *part.shape[2:])
        scores = jnp.where(part, scores, -jnp.inf) if part.dtype == jnp.bool_ else scores + part
    hidden = []
    if not isinstance(fresh, int):
        hidden.append(positions < fresh)
    if masking.lengths is not None:
        hidden.append((positions >= masking.lengths[:, None])[:, None, None, None, :])
    if not masking.band.is_full:
        distance = positions - (masking.offset + row + jnp.arange(queries)[:, None])
        if masking.band.left is not None:
            hidden.append(distance < -masking.band.left)
        if masking.band.right is not None:
            hidden.append(distance > masking.band.right)
    for where in hidden:
        scores = jnp.where(where, -jnp.inf, scores)
    return scores


def finish(state: State) -> tuple[Array, Array]:
    """The results; a row without any visible key is zeros, as in torch, with log-sum-exp -inf.

    Such a row weighs exactly 0. `weight > 0` would also be false for NaN, and turn a broken row into zeros.
    """
    empty = state.weight == 0.0
    weight = jnp.where(empty, 1.0, state.weight)
    out = jnp.where(empty[..., None], 0.0, state.total / weight[..., None])
    return out, jnp.where(empty, -jnp.inf, state.maximum + jnp.log(weight))
