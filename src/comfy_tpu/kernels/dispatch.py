"""The public attention functions: check torch's contract, choose a kernel and a strategy over the mesh, call it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from comfy_tpu.config import AttentionConfig, MeshSizes, Platform
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels.choice import (
    Call,
    Implementation,
    choose_implementation,
    choose_strategy,
    has_int8_scores,
)
from comfy_tpu.kernels.chunked import chunked_attention
from comfy_tpu.kernels.cudnn import cudnn_attention
from comfy_tpu.kernels.hopper import hopper_attention
from comfy_tpu.kernels.int8_scores import round_to_int8
from comfy_tpu.kernels.masking import Masking, make_band, show_first, split_mask
from comfy_tpu.kernels.sharded import attention_over_mesh, joint_attention_over_mesh
from comfy_tpu.kernels.splash import splash_attention
from comfy_tpu.kernels.tiled import chunked_tiles, splash_tiles
from comfy_tpu.kernels.windows import TileSchedule
from comfy_tpu.parallel.placement import Placement


def attention(
    query: Float[Array, "batch heads queries head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    *,
    placement: Placement | None,
    config: AttentionConfig,
    mask: Bool[Array, "*mask"] | Float[Array, "*mask"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    tiles: TileSchedule | None = None,
    queries_end: bool = False,
) -> Float[Array, "batch heads queries value_dim"]:
    """softmax(query · keyᵀ · scale + mask) · value, as torch.nn.functional.scaled_dot_product_attention.

    Beyond torch: `window=(left, right)` lets query i see keys i - left … i + right only, and `kv_lengths` hides each
    sequence's keys from its length on. Both combine with everything else; rows without any visible key are zeros.
    `tiles` limits self-attention among the first `tiles.tokens` tokens to neighbouring tiles, and combines with
    `kv_lengths` only; the tokens after those see and are seen by all. `queries_end`: queries from `kv_lengths` on are
    padding as their keys are, and their results, which nobody uses, may be zeros.

    `placement` None: one device, plain JAX. Otherwise arrays are those of the whole mesh (dp: batch, tp: heads,
    sp: sequence), sharded or not. Inference only: kernels have no backward pass.
    """
    platform: Platform = "cpu" if placement is None else placement.platform
    chip = "cpu" if placement is None else placement.chip
    sizes = MeshSizes() if placement is None or not config.over_mesh else placement.sizes

    key, value = _check_shapes(query, key, value, enable_gqa)
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = value.shape[2:]
    lengths = None if kv_lengths is None else _check_lengths(jnp.asarray(kv_lengths), batch)
    key_mask, dense_mask = None, None
    if mask is not None:
        if is_causal:
            raise InvalidValueError(
                "mask and is_causal=True were both given; torch allows one of them; put the causal part into the mask, "
                "or pass kv_lengths or window, which combine with is_causal"
            )
        key_mask, dense_mask = split_mask(jnp.asarray(mask), batch, heads, queries, keys)
    masking = Masking(band=make_band(is_causal, window), lengths=lengths, keys=key_mask, dense=dense_mask, tiles=tiles)
    _check_tiles(masking, queries, keys)

    call = Call(
        heads=heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=query.dtype,
        band=masking.band,
        key_mask="none" if key_mask is None else "bool" if key_mask.dtype == jnp.bool_ else "float",
        dense_mask=dense_mask is not None,
        has_lengths=lengths is not None,
        tiles=tiles,
    )
    strategy = choose_strategy(call, platform, sizes, config)
    shares_sequence = sizes.sp > 1 or (heads == 1 and sizes.tp > 1)
    sharded = strategy if shares_sequence else None
    implementation = choose_implementation(call, platform, chip, config, sharded=sharded)
    if query.size == 0:
        return jnp.zeros((batch, heads, queries, value_dim), query.dtype)

    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    if scale <= 0:
        # cuDNN answers NaN to a scale below zero, and our Hopper kernel hides keys before it scales.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)

    local = functools.partial(
        _local,
        implementation=implementation,
        scale=scale,
        platform=platform,
        chip=chip,
        config=config,
        int8_scores=has_int8_scores(call, config, sharded=sharded),
    )
    # The partitioner takes no kernel of ours. Qwen2.5-VL sees 6,400 patches of an image at once, a million pixels.
    is_mapped = sizes.device_count > 1 or implementation in ("splash", "hopper")
    if placement is None or placement.sizes.device_count == 1 or not is_mapped:
        return local(query, key, value, dataclasses.replace(masking, queries_end=queries_end), partial=False)[0]
    return attention_over_mesh(
        query,
        key,
        value,
        masking,
        placement=placement,
        strategy=strategy,
        # A single head (a VAE's) leaves tp nothing to divide.
        divides_heads=heads > 1 and config.over_mesh,
        local=local,
    )


def joint_attention(
    first: Sequence[Float[Array, "batch heads tokens head_dim"]],
    second: Sequence[Float[Array, "batch heads others head_dim"]],
    *,
    placement: Placement | None,
    config: AttentionConfig,
    kv_lengths: Int[Array, " batch"] | None = None,
    tiles: TileSchedule | None = None,
) -> tuple[Float[Array, "batch heads tokens head_dim"], Float[Array, "batch heads others head_dim"]]:
    """Attention over two sequences, (query, key, value) each, as if the second were appended to the first.

    `kv_lengths` counts keys of both; tokens beyond are padding, and their results may be zeros. Returns the results of
    each: a video and its text never need to be one array that is split over the mesh. `tiles` limits attention among
    the tokens of the first.
    """
    count, more = first[0].shape[2], second[0].shape[2]
    batch, heads, _, head_dim = first[0].shape
    sizes = MeshSizes() if placement is None or not config.over_mesh else placement.sizes
    call = Call(
        heads=heads,
        queries=count + more,
        keys=count + more,
        head_dim=head_dim,
        value_dim=first[2].shape[3],
        dtype=first[0].dtype,
        has_lengths=kv_lengths is not None,
        tiles=tiles,
    )
    platform: Platform = "cpu" if placement is None else placement.platform
    strategy = choose_strategy(call, platform, sizes, config)
    if placement is None or sizes.sp == 1 or strategy != "ulysses":
        joined = (jnp.concatenate(pair, axis=2) for pair in zip(first, second, strict=True))
        out = attention(
            *joined, placement=placement, config=config, kv_lengths=kv_lengths, tiles=tiles, queries_end=True
        )
        return out[:, :, :count], out[:, :, count:]
    implementation = choose_implementation(call, platform, placement.chip, config, sharded=strategy)

    local = functools.partial(
        _local,
        implementation=implementation,
        scale=1.0 / math.sqrt(head_dim),
        platform=platform,
        chip=placement.chip,
        config=config,
        int8_scores=has_int8_scores(call, config, sharded=strategy),
    )
    lengths = None if kv_lengths is None else _check_lengths(jnp.asarray(kv_lengths), batch)
    _check_tiles(Masking(tiles=tiles), count, count)
    masking = Masking(lengths=lengths, tiles=tiles)
    return joint_attention_over_mesh(first, second, masking, placement=placement, local=local)


def _local(
    query: Array,
    key: Array,
    value: Array,
    masking: Masking,
    *,
    partial: bool,
    implementation: Implementation,
    scale: float,
    platform: Platform,
    chip: str,
    config: AttentionConfig,
    int8_scores: bool = False,
) -> tuple[Array, Array | None]:
    if int8_scores and implementation != "hopper":
        query, key = round_to_int8(query, key)
    if masking.tiles is not None:
        tokens, lengths = masking.tiles.tokens, masking.lengths
        if implementation == "splash":
            video = splash_tiles(
                query,
                key,
                value,
                masking.tiles,
                lengths,
                scale=scale,
                chip=chip,
                interpret=platform == "cpu",
                smooth_keys=config.smooth_keys,
            )
        else:
            wide = _widen_for_cpu(platform, query, key, value)
            video = chunked_tiles(*wide, masking.tiles, lengths, scale=scale).astype(query.dtype)
        if query.shape[2] == tokens:
            return video, None
        others, _ = _local(
            query[:, :, tokens:],
            key,
            value,
            Masking(lengths=lengths),
            partial=False,
            implementation=implementation,
            scale=scale,
            platform=platform,
            chip=chip,
            config=config,
        )
        return jnp.concatenate((video, others), axis=2), None
    if implementation == "splash":
        return splash_attention(
            query,
            key,
            value,
            masking,
            scale=scale,
            chip=chip,
            blocks=config.block_sizes,
            interpret=platform == "cpu",
            partial=partial,
            smooth_keys=config.smooth_keys,
        )
    if implementation == "hopper":
        key, value, lengths = show_first(key, value, masking)
        ends = masking.queries_end and masking.keys is None and lengths is not None
        return hopper_attention(
            query, key, value, scale=scale, lengths=lengths, queries_end=ends, int8_scores=int8_scores
        ), None
    if implementation == "cudnn":
        return cudnn_attention(query, key, value, masking, scale=scale), None
    wide = _widen_for_cpu(platform, query, key, value)
    out, logsumexp = chunked_attention(*wide, masking, scale=scale, single_chunk=implementation == "dense")
    return (out, logsumexp) if partial else (out.astype(query.dtype), None)


def _widen_for_cpu(platform: Platform, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """float32 for bfloat16 on a CPU: XLA of jax 0.12 refuses products with float32 results where it moved an operand's
    transpose into them (UNIMPLEMENTED: DotThunk BF16 x BF16 = F32)."""
    if platform != "cpu":
        return query, key, value
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def _check_tiles(masking: Masking, queries: int, keys: int) -> None:
    if masking.tiles is None:
        return
    if queries != keys or masking.tiles.tokens > keys:
        raise InvalidValueError(
            f"tiles are of {masking.tiles.tokens} tokens, and attention is of {queries} queries to {keys} keys; "
            "expected self-attention of the tokens and of others after them"
        )
    if not masking.band.is_full or masking.keys is not None or masking.dense is not None:
        raise InvalidValueError("tiles were given with a mask, is_causal or window; they combine with kv_lengths only")


def _check_shapes(query: Array, key: Array, value: Array, enable_gqa: bool) -> tuple[Array, Array]:
    """Keys and values broadcast to the batch of the query; they may have fewer heads."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise InvalidValueError(
                f"{name} has {array.ndim} dimensions, shape {tuple(array.shape)}; expected [batch, heads, length, "
                "head_dim]; reshape it first",
                field=name,
            )
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != query.dtype:
            raise InvalidValueError(
                f"{name} has dtype {array.dtype} and query {query.dtype}; expected one floating dtype for query, key "
                "and value; convert them with astype",
                field=name,
            )
    if query.shape[3] != key.shape[3]:
        raise InvalidValueError(
            f"query has head_dim={query.shape[3]} and key head_dim={key.shape[3]}; they must be equal"
        )
    if key.shape[:3] != value.shape[:3]:
        raise InvalidValueError(
            f"key has [batch, heads, length] = {list(key.shape[:3])} and value {list(value.shape[:3])}; "
            "they must be equal"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[2] == 0:
        raise InvalidValueError(f"key has length 0, shape {tuple(key.shape)}; attention needs at least one key")
    if heads != kv_heads and kv_heads != 1 and not enable_gqa:
        raise InvalidValueError(
            f"query has heads={heads} and key heads={kv_heads}; pass enable_gqa=True to share each key head among "
            "several query heads"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidValueError(
            f"query heads={heads} is not divisible by key heads={kv_heads}; grouped-query attention gives every key "
            "head the same number of query heads"
        )
    if key.shape[0] not in (1, query.shape[0]):
        raise InvalidValueError(f"query has batch={query.shape[0]} and key batch={key.shape[0]}; expected equal, or 1")
    if key.shape[0] != query.shape[0]:
        key, value = (jnp.broadcast_to(array, (query.shape[0], *array.shape[1:])) for array in (key, value))
    return key, value


def _check_lengths(kv_lengths: Array, batch: int) -> Array:
    if kv_lengths.shape != (batch,) or not jnp.issubdtype(kv_lengths.dtype, jnp.integer):
        raise InvalidValueError(
            f"kv_lengths has shape {tuple(kv_lengths.shape)} and dtype {kv_lengths.dtype}; expected integers of shape "
            f"({batch},), the number of keys of each sequence"
        )
    return kv_lengths.astype(jnp.int32)
