"""Queries and keys in 8 bits, block by block, as in SageAttention: the product of two integers is exact, and one number
a block makes scores of it.

Keys are counted from their mean first, which a softmax does not depend on: what all keys have in common would take most
of the 8 bits. Values and the shares that weigh them stay in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

QUERY_ROWS, KEY_ROWS = 64, 192
"""Rows of a block: the Hopper kernel's tile."""
_LARGEST = 127.0


class Blocks(NamedTuple):
    """An array whose blocks of rows are whole numbers times the block's scale."""

    numbers: Int8[Array, "batch rows heads head_dim"]
    scales: Float[Array, "batch heads blocks"]
    block_rows: int

    def values(self) -> Float[Array, "batch rows heads head_dim"]:
        """The array again, in float32."""
        scales = jnp.repeat(self.scales.swapaxes(1, 2), self.block_rows, axis=1)[:, : self.numbers.shape[1], :, None]
        return self.numbers.astype(jnp.float32) * scales


def center_keys(key: Float[Array, "batch keys heads head_dim"]) -> Float[Array, "batch keys heads head_dim"]:
    """Keys minus their mean, in float32."""
    key = key.astype(jnp.float32)
    return key - jnp.mean(key, axis=1, keepdims=True)


def quantize_blocks(array: Float[Array, "batch rows heads head_dim"], rows: int) -> Blocks:
    """The array in blocks of so many rows of a head; the last may have fewer."""
    batch, count, heads, dim = array.shape
    blocks = -(-count // rows)
    padded = jnp.pad(array.astype(jnp.float32), ((0, 0), (0, blocks * rows - count), (0, 0), (0, 0)))
    parts = padded.reshape(batch, blocks, rows, heads, dim)
    scales = jnp.max(jnp.abs(parts), axis=(2, 4)) / _LARGEST
    numbers = jnp.round(parts / jnp.where(scales == 0, 1.0, scales)[:, :, None, :, None])
    numbers = numbers.astype(jnp.int8).reshape(batch, blocks * rows, heads, dim)[:, :count]
    return Blocks(numbers, scales.swapaxes(1, 2), rows)


def round_to_int8(
    query: Float[Array, "batch heads queries head_dim"], key: Float[Array, "batch heads keys head_dim"]
) -> tuple[Array, Array]:
    """Queries and keys as 8 bits leave them, for kernels without products of integers: the same results, slower."""
    rounded = (
        quantize_blocks(query.swapaxes(1, 2), QUERY_ROWS),
        quantize_blocks(center_keys(key.swapaxes(1, 2)), KEY_ROWS),
    )
    query, key = (blocks.values().swapaxes(1, 2).astype(query.dtype) for blocks in rounded)
    return query, key
