"""Self-attention from its projections to its result, for models that norm and rotate queries and keys (RoPE), on TPU.

What attention needs of linear layers' results is done in as few passes over memory as there are arrays: one kernel for
norm and rotation, which leaves what is sent to each device in one piece, the exchange, the attention kernel. Each
device's share of a sequence keeps whole registers of rows all the way, so that shares are put together for nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from comfy_tpu.config import AttentionConfig, MeshSizes
from comfy_tpu.kernels.choice import Call, choose_implementation, choose_strategy
from comfy_tpu.kernels.rotary import rotate_heads
from comfy_tpu.kernels.splash import Shares, share_tile, splash_columns
from comfy_tpu.kernels.tuning import LANES
from comfy_tpu.parallel.placement import Placement

_REGISTER_ROWS = 16
"""Rows of a register of bfloat16; one of float32 has half of them."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """What is done to queries and keys before they meet: an RMS norm over all heads, and RoPE."""

    query_weight: Float[Array, " columns"]
    key_weight: Float[Array, " columns"]
    epsilon: float
    cosine: Float[Array, "tokens pairs"]
    sine: Float[Array, "tokens pairs"]


def has_rotary_attention(
    shape: tuple[int, ...], heads: int, dtype: jnp.dtype, placement: Placement | None, config: AttentionConfig
) -> bool:
    """Whether `rotary_attention` takes [batch, tokens, heads × head_dim] arrays of this shape.

    On a TPU, for full attention by the splash kernel, on one device or with Ulysses; on the CPU, where the kernel is
    asked for, it is interpreted.
    """
    if placement is None or not config.over_mesh or config.window is not None:
        return False
    batch, tokens, columns = shape
    sizes, head_dim = placement.sizes, columns // heads
    if batch % sizes.dp or tokens % sizes.sp or heads % sizes.tp or head_dim % LANES:
        return False
    call = Call(heads=heads, queries=tokens, keys=tokens, head_dim=head_dim, value_dim=head_dim, dtype=dtype)
    strategy = choose_strategy(call, placement.platform, sizes, config)
    sharded = strategy if sizes.sp > 1 else None
    if choose_implementation(call, placement.platform, placement.chip, config, sharded=sharded) != "splash":
        return False
    if sharded not in (None, "ulysses"):
        return False
    return share_tile(_shares(tokens, sizes), sizes.sp, head_dim, placement.chip, config.block_sizes) is not None


def rotary_attention(
    query: Float[Array, "batch tokens columns"],
    key: Float[Array, "batch tokens columns"],
    value: Float[Array, "batch tokens columns"],
    rotary: Rotary,
    *,
    heads: int,
    placement: Placement,
    config: AttentionConfig,
) -> Float[Array, "batch tokens columns"]:
    """Norm, RoPE and full self-attention of arrays of the whole mesh (dp: batch, sp: tokens, tp: heads)."""
    sizes = placement.sizes
    tokens, columns = query.shape[1:]
    head_dim = columns // heads
    shares = _shares(tokens, sizes)
    arrays = {"query": query, "key": key, "value": value, "cosine": rotary.cosine, "sine": rotary.sine}
    spec = P("dp", "sp", "tp")
    specs = {"query": spec, "key": spec, "value": spec, "cosine": P("sp"), "sine": P("sp")}
    arrays |= {"query_weight": rotary.query_weight, "key_weight": rotary.key_weight}
    specs |= {"query_weight": P("tp"), "key_weight": P("tp")}
    if sizes.tp > 1:  # the columns of a row are on several devices
        for name in ("query", "key"):
            with jax.named_scope("rms_norm"):  # by which `plan` knows the sum over tp
                mean = jnp.mean(jnp.square(arrays[name].astype(jnp.float32)), axis=2, keepdims=True)
            arrays[f"{name}_inverse_rms"] = lax.rsqrt(mean + rotary.epsilon)
            specs[f"{name}_inverse_rms"] = P("dp", "sp")

    def rotate(arrays: dict[str, Array], name: str) -> Array:
        return rotate_heads(
            arrays[name],
            arrays["cosine"],
            arrays["sine"],
            head_dim=head_dim,
            groups=sizes.sp,
            padded_rows=shares.rows,
            weight=arrays[f"{name}_weight"],
            epsilon=rotary.epsilon if sizes.tp == 1 else None,
            inverse_rms=arrays.get(f"{name}_inverse_rms"),
            chip=placement.chip,
            interpret=placement.platform == "cpu",
        )

    def body(arrays: dict[str, Array]) -> Array:
        values = _split_heads(arrays["value"], sizes.sp, shares.rows)
        out = splash_columns(
            *(_join_sequence(part) for part in (rotate(arrays, "query"), rotate(arrays, "key"), values)),
            heads=heads // sizes.tp // sizes.sp,
            shares=shares,
            scale=head_dim**-0.5,
            chip=placement.chip,
            blocks=config.block_sizes,
            interpret=placement.platform == "cpu",
            smooth_keys=config.smooth_keys,
        )
        return _split_sequence(out, sizes.sp)[:, : shares.tokens]

    if sizes.device_count == 1:
        return body(arrays)
    # check_vma=False: a Pallas call does not say over which axes its results vary.
    result: Array = jax.shard_map(body, mesh=placement.mesh, in_specs=(specs,), out_specs=spec, check_vma=False)(arrays)
    return result


def _shares(tokens: int, sizes: MeshSizes) -> Shares:
    own = tokens // sizes.sp
    return Shares(own, own if sizes.sp == 1 else -(-own // _REGISTER_ROWS) * _REGISTER_ROWS)


def _split_heads(columns: Array, sp: int, rows: int) -> Array:
    """[B, a share of the tokens, all heads × D] -> [devices, B, rows, a share of the heads × D], filled with zeros."""
    parts = jnp.stack(jnp.split(columns, sp, axis=2))
    return jnp.pad(parts, ((0, 0), (0, 0), (0, rows - columns.shape[1]), (0, 0)))


def _join_sequence(parts: Array) -> Array:
    """[devices, B, rows, a share of the heads × D] on each -> [B, all rows, its share of the heads × D]."""
    if parts.shape[0] == 1:
        return parts[0]
    parts = lax.all_to_all(parts, "sp", split_axis=0, concat_axis=0, tiled=True)
    return parts.transpose(1, 0, 2, 3).reshape(parts.shape[1], -1, parts.shape[3])


def _split_sequence(columns: Array, sp: int) -> Array:
    """[B, all rows, a share of the heads × D] on each -> [B, its share of the rows, all heads × D]."""
    if sp == 1:
        return columns
    batch, rows, width = columns.shape
    parts = columns.reshape(batch, sp, rows // sp, width).transpose(1, 0, 2, 3)
    parts = lax.all_to_all(parts, "sp", split_axis=0, concat_axis=0, tiled=True)
    return jnp.concatenate(list(parts), axis=2)
