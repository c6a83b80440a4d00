"""One attention over the mesh: batch over dp, heads over tp, sequence over sp.

shard_map is given the placement's mesh as it is. That works for a concrete mesh inside and outside jit, and for an
AbstractMesh when a program is exported for devices that are not attached: `jax.export.export(jax.jit(f),
platforms=["tpu"])` with argument shardings on the same abstract mesh. No use_abstract_mesh or set_mesh is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from comfy_tpu.kernels.choice import Strategy
from comfy_tpu.kernels.masking import Masking, merge_attention
from comfy_tpu.parallel.placement import Placement


class LocalAttention(Protocol):
    """The kernel of one device. With `partial` it returns float32 and log-sum-exp, to be merged with other parts."""

    def __call__(
        self, query: Array, key: Array, value: Array, masking: Masking, *, partial: bool
    ) -> tuple[Array, Array | None]: ...


def attention_over_mesh(
    query: Array,
    key: Array,
    value: Array,
    masking: Masking,
    *,
    placement: Placement,
    strategy: Strategy,
    divides_heads: bool,
    local: LocalAttention,
) -> Array:
    """`divides_heads`: whether tp takes shares of the heads, or of the queries as sp does."""
    sizes = placement.sizes
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    shards_keys = strategy != "whole_keys"
    head_axis, query_axes = ("tp", ("sp",)) if divides_heads else (None, ("sp", "tp"))
    head_shards, query_shards = (sizes.tp, sizes.sp) if divides_heads else (1, sizes.sp * sizes.tp)

    copies = _kv_copies(heads, key.shape[1], head_shards * (sizes.sp if strategy == "ulysses" else 1))
    if copies > 1:
        key, value = (jnp.repeat(array, copies, axis=1) for array in (key, value))

    query_padding = -queries % query_shards
    query = _pad(query, 2, query_padding)
    key_padding = -keys % sizes.sp if shards_keys else 0
    if key_padding:
        key, value = (_pad(array, 2, key_padding) for array in (key, value))
        key_mask = None if masking.keys is None else _pad(masking.keys, 1, key_padding)
        lengths = jnp.full((batch,), keys, jnp.int32) if masking.lengths is None else jnp.minimum(masking.lengths, keys)
        masking = dataclasses.replace(masking, keys=key_mask, lengths=lengths)

    dp = "dp" if batch % sizes.dp == 0 else None
    kv_axis = "sp" if shards_keys else None
    arrays = {"query": query, "key": key, "value": value}
    key_spec = P(dp, head_axis, kv_axis)
    specs = {"query": P(dp, head_axis, query_axes), "key": key_spec, "value": key_spec}
    if masking.lengths is not None:
        arrays["lengths"], specs["lengths"] = masking.lengths, P(dp)
    if masking.keys is not None:
        # Whole on every device: a ring would send 600 bytes of it beside megabytes of keys, for 5 µs each.
        arrays["keys"], specs["keys"] = masking.keys, P(dp)
    if masking.dense is not None:
        mask = masking.dense if masking.dense.shape[2] == 1 else _pad(masking.dense, 2, query_padding)
        axes = zip(mask.shape, (dp, head_axis, query_axes, None), strict=True)
        arrays["dense"], specs["dense"] = mask, P(*(None if size == 1 else axis for size, axis in axes))

    def body(arrays: dict[str, Array]) -> Array:
        inside = Masking(
            band=masking.band,
            lengths=arrays.get("lengths"),
            keys=arrays.get("keys"),
            dense=arrays.get("dense"),
            tiles=masking.tiles,
        )
        if strategy == "whole_keys":
            if query_shards > 1:
                inside = dataclasses.replace(inside, offset=lax.axis_index(query_axes) * arrays["query"].shape[2])
            return local(arrays["query"], arrays["key"], arrays["value"], inside, partial=False)[0]
        run = {"ulysses": _ulysses, "ring": _ring}[strategy]
        return run(arrays["query"], arrays["key"], arrays["value"], inside, local, sizes.sp)

    # check_vma=False: a Pallas call does not say over which axes its results vary.
    out = jax.shard_map(body, mesh=placement.mesh, in_specs=(specs,), out_specs=specs["query"], check_vma=False)(arrays)
    return out[:, :, :queries]


def joint_attention_over_mesh(
    first: Sequence[Array],
    second: Sequence[Array],
    masking: Masking,
    *,
    placement: Placement,
    local: LocalAttention,
) -> tuple[Array, Array]:
    """Ulysses over two sequences that attend to each other as one, (query, key, value) each.

    They are concatenated after the exchange, when every device has them whole. Before it, both are split along the
    dimension of the concatenation, and XLA would gather such arrays on every device.
    """
    sp, counts = placement.sizes.sp, (first[0].shape[2], second[0].shape[2])
    parts = tuple(tuple(_pad(array, 2, -array.shape[2] % sp) for array in part) for part in (first, second))
    dp = "dp" if first[0].shape[0] % placement.sizes.dp == 0 else None
    spec = P(dp, "tp", "sp")

    def body(parts: tuple[tuple[Array, ...], ...], lengths: Array | None) -> tuple[Array, ...]:
        whole = [[_to_heads(array)[:, :, :count] for array in part] for part, count in zip(parts, counts, strict=True)]
        query, key, value = (jnp.concatenate(pair, axis=2) for pair in zip(*whole, strict=True))
        out, _ = local(query, key, value, dataclasses.replace(masking, lengths=lengths), partial=False)
        outs = out[:, :, : counts[0]], out[:, :, counts[0] :]
        return tuple(_to_sequence(_pad(part, 2, -part.shape[2] % sp)) for part in outs)

    outs = jax.shard_map(body, mesh=placement.mesh, in_specs=(spec, P(dp)), out_specs=(spec, spec), check_vma=False)(
        parts, masking.lengths
    )
    return outs[0][:, :, : counts[0]], outs[1][:, :, : counts[1]]


def _to_heads(array: Array) -> Array:
    """[B, all heads, a share of the sequence, D] -> [B, a share of the heads, the whole sequence, D].

    Heads are columns of [B, tokens, heads × D] meanwhile, as linear layers and the splash kernel have them: XLA then
    drops the transpositions here against theirs. In the order of the arguments, each would be a pass over memory.
    """
    sp = lax.axis_size("sp")
    batch, heads, tokens, width = array.shape
    columns = array.transpose(0, 2, 1, 3).reshape(batch, tokens, sp, heads // sp * width)
    # What each device gets comes first, and what each has sent: the exchange itself then moves whole arrays.
    columns = lax.all_to_all(columns.transpose(2, 0, 1, 3), "sp", split_axis=0, concat_axis=0, tiled=True)
    return columns.transpose(1, 0, 2, 3).reshape(batch, sp * tokens, heads // sp, width).transpose(0, 2, 1, 3)


def _to_sequence(array: Array) -> Array:
    """The reverse of `_to_heads`."""
    sp = lax.axis_size("sp")
    batch, heads, tokens, width = array.shape
    columns = array.transpose(0, 2, 1, 3).reshape(batch, sp, tokens // sp, heads * width)
    columns = lax.all_to_all(columns.transpose(1, 0, 2, 3), "sp", split_axis=0, concat_axis=0, tiled=True)
    return columns.transpose(1, 2, 0, 3).reshape(batch, tokens // sp, heads * sp, width).transpose(0, 2, 1, 3)


def _ulysses(query: Array, key: Array, value: Array, masking: Masking, local: LocalAttention, sp: int) -> Array:
    query, key, value = (_to_heads(array) for array in (query, key, value))
    out, _ = local(query, key, value, masking, partial=False)
    return _to_sequence(out)


def _ring(query: Array, key: Array, value: Array, masking: Masking, local: LocalAttention, sp: int) -> Array:
    own = lax.axis_index("sp")
    neighbours = [(source, (source + 1) % sp) for source in range(sp)]

    def attend(step: int | Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
        source = (own - step) % sp
        first_key = source * key.shape[2]
        inside = Masking(
            band=masking.band,
            offset=own * query.shape[2] - first_key,
            lengths=None if masking.lengths is None else masking.lengths - first_key,
            keys=None
            if masking.keys is None
            else lax.dynamic_slice_in_dim(masking.keys, first_key, key.shape[2], axis=1),
        )
        out, logsumexp = local(query, held[0], held[1], inside, partial=True)
        assert logsumexp is not None
        return out, logsumexp

    def step(
        carry: tuple[tuple[Array, Array], Array, Array], index: Array
    ) -> tuple[tuple[tuple[Array, Array], Array, Array], None]:
        held, out, logsumexp = carry
        # Sent on before it is used, so that the transfer runs beside the kernel.
        coming = lax.ppermute(held, "sp", neighbours)
        return (coming, *merge_attention(out, logsumexp, *attend(index, held))), None

    rows = query.shape[:3]
    empty = jnp.zeros((*rows, value.shape[3]), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32)
    (held, out, logsumexp), _ = lax.scan(step, ((key, value), *empty), jnp.arange(sp - 1))
    out, _ = merge_attention(out, logsumexp, *attend(sp - 1, held))
    return out.astype(query.dtype)


def _kv_copies(heads: int, kv_heads: int, shards: int) -> int:
    """How often each key head is repeated so that the shards divide them: the fewest copies that the groups allow."""
    group = heads // kv_heads
    return next((n for n in range(1, group) if group % n == 0 and kv_heads * n % shards == 0), group)


def _pad(array: Array, axis: int, amount: int) -> Array:
    if amount == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, amount)
    return jnp.pad(array, widths)
