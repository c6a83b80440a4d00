"""NVIDIA Hopper: flash attention in Pallas (Mosaic GPU), for long sequences that see every key, or the first ones.

The plan is FlashAttention-3's. A block of threads owns some query rows. One warpgroup fetches keys and values into a
ring in shared memory; two others compute, each on its own rows, and take turns: while one is at the softmax, the other
has the tensor cores.

JAX has such a kernel (jax.experimental.pallas.ops.gpu.attention_mgpu), for float16 in effect (its buffers are, whatever
the inputs), lengths that divide by its tiles, and scores that are scaled before. This one takes bfloat16, any length,
also one that only the device knows, and a scale.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from comfy_tpu.kernels import cudnn
from comfy_tpu.kernels.int8_scores import KEY_ROWS, QUERY_ROWS, center_keys, quantize_blocks

COMPUTE_WARPGROUPS = 2
"""The number of warpgroups that compute. One more fetches keys and values."""
_REGISTERS = {"computing": 232, "fetching": 40}


@dataclasses.dataclass(frozen=True)
class Tile:
    queries: int = QUERY_ROWS
    """Rows of each computing warpgroup: a wgmma has 64."""
    keys: int = KEY_ROWS
    stages: int = 2
    """Tiles of keys and of values that are in shared memory at a time."""


TILE = Tile()
"""32,760 tokens and 40 heads of 128 on an H200, in TFLOP/s, without and with a running maximum: 192 keys 700 and 649,
128 keys 692 and 616; cuDNN 569. Tiles of 160 and 176 keys are not for Pallas, 256 do not fit into shared memory."""
SAFE_EXPONENT = 80.0
"""Scores below this, in powers of two, need no running maximum: bfloat16 has the exponents of float32, so that a share
of 2⁻⁸⁰ is as exact as one of 1, and 10⁶ shares of 2⁸⁰ are still a number. The softmax then has no maxima to find and
nothing to scale anew, which are a third of its work."""

_SMALLEST_WEIGHT = 2.0**-120
"""Below any sum of shares: the total of a sequence without keys, which is 0, is divided by it."""


def is_installed() -> bool:
    """Whether Pallas can build a kernel for GPUs here. Its import wants absl, which jax does not bring."""
    return cudnn.is_installed() and importlib.util.find_spec("absl") is not None


def hopper_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float,
    lengths: Array | None = None,
    queries_end: bool = False,
    int8_scores: bool = False,
    tile: Tile = TILE,
) -> Array:
    """[B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, D] -> [B, H, Lq, D]. choice.py lists the calls that it takes.

    `lengths`, int32 [B]: keys from here on are hidden; tiles of hidden keys are not read. A sequence without keys is
    zeros. `queries_end`: queries from there on are padding, too, and blocks of them are zeros.

    `int8_scores`: queries and keys meet in 8 bits, for calls without lengths.
    """
    queries, keys = query.shape[2], key.shape[2]
    q, k, v = (_pad_rows(array.swapaxes(1, 2)) for array in (query, key, value))
    scale *= math.log2(math.e)
    scales: tuple[Array, ...] = ()
    if int8_scores:
        k = _pad_rows(center_keys(k[:, :keys]))
    may_be_small = query.dtype == jnp.bfloat16
    is_small = _largest_score(q, k) * abs(scale) < SAFE_EXPONENT if may_be_small else jnp.zeros((), bool)
    if int8_scores:
        blocks = quantize_blocks(q, tile.queries), quantize_blocks(k, tile.keys)
        (q, k), scales = (each.numbers for each in blocks), (blocks[0].scales * scale, blocks[1].scales)
        scale = 1.0
    flag = is_small.astype(jnp.int32).reshape(1)
    if lengths is not None:
        lengths = jnp.clip(lengths, 0, keys).astype(jnp.int32)
    options = {"keys": keys, "scale": scale, "tile": tile, "may_be_small": may_be_small, "queries_end": queries_end}
    out = _attention(flag, q, k, v, lengths, scales, **options)
    return out[:, :queries].swapaxes(1, 2)


def _largest_score(q: Array, k: Array) -> Array:
    """An upper bound of every |query · key|: the product of the longest of each (Cauchy and Schwarz)."""

    def longest(x: Array) -> Array:
        return jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))

    return jnp.sqrt(longest(q) * longest(k))


def _pad_rows(array: Array) -> Array:
    """[B, L, H, D] padded to a multiple of 8 rows, as copies into tiled shared memory require."""
    fill = -array.shape[1] % 8
    return jnp.pad(array, ((0, 0), (0, fill), (0, 0), (0, 0))) if fill else array


@functools.partial(jax.jit, static_argnames=("keys", "scale", "tile", "may_be_small", "queries_end"))
def _attention(
    is_small: Array,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    scales: tuple[Array, ...],
    *,
    keys: int,
    scale: float,
    tile: Tile,
    may_be_small: bool,
    queries_end: bool,
) -> Array:
    """Attention over arrays [B, L, H, D]. `scale` is that of base-2 exponents. `lengths`: between 0 and `keys`.
    `scales`: of queries and keys in 8 bits, [B, H, tiles] each. `is_small`, one number: whether scores are so small
    that they need no running maximum, which the kernel asks for itself (`lax.cond` would have the host wait for the
    answer, and the device for the host, in every layer). `may_be_small`: whether it asks at all.
    """
    pl, plgpu = _pallas()
    batch, queries, heads, dim = q.shape
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            keys=keys,
            scale=scale,
            tile=tile,
            may_be_small=may_be_small,
            has_lengths=lengths is not None,
            queries_end=queries_end,
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, v.dtype),
        # Heads first: 601 TFLOP/s where rows first, with all blocks after the same keys at the same time, has 490.
        grid=(heads, pl.cdiv(queries, COMPUTE_WARPGROUPS * tile.queries), batch),
        grid_names=("head", "rows", "batch"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plgpu, dim, q.dtype, v.dtype, tile),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(is_small, q, k, v, *(() if lengths is None else (lengths,)), *scales)


def _pallas() -> tuple[Any, Any]:
    """Pallas and its Mosaic GPU part, imported when a kernel is built: not every machine can import them."""
    return importlib.import_module("jax.experimental.pallas"), importlib.import_module(
        "jax.experimental.pallas.mosaic_gpu"
    )


def _scratch(plgpu: Any, dim: int, dtype: Any, value_dtype: Any, tile: Tile) -> dict[str, Any]:
    """`dtype`: of queries and keys."""

    def tiles(count: int, rows: int, dtype: Any) -> Any:
        swizzle = min(128, dim * jnp.dtype(dtype).itemsize)  # bytes
        tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM((count, rows, dim), dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    def ready_barrier(count: int) -> Any:
        return plgpu.Barrier(num_barriers=count)

    def free_barrier(count: int) -> Any:
        return plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=count)

    q_tiles = tiles(COMPUTE_WARPGROUPS, tile.queries, dtype)
    return {
        "q_tiles": q_tiles,
        # Queries are read once, so that their room is free in the end where the result has their dtype.
        **({} if dtype == value_dtype else {"out_tiles": tiles(COMPUTE_WARPGROUPS, tile.queries, value_dtype)}),
        "k_tiles": tiles(tile.stages, tile.keys, dtype),
        "v_tiles": tiles(tile.stages, tile.keys, value_dtype),
        "q_ready": ready_barrier(COMPUTE_WARPGROUPS),
        "k_ready": ready_barrier(tile.stages),
        "v_ready": ready_barrier(tile.stages),
        "k_free": free_barrier(tile.stages),
        "v_free": free_barrier(tile.stages),
        "turn": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
    }


def _transpose_ref(plgpu: Any, ref: Any) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))  # before jax 0.11


def _kernel(
    is_small: Any,
    q: Any,
    k: Any,
    v: Any,
    *others: Any,
    keys: int,
    scale: float,
    tile: Tile,
    may_be_small: bool,
    has_lengths: bool,
    queries_end: bool,
    q_tiles: Any,
    k_tiles: Any,
    v_tiles: Any,
    q_ready: Any,
    k_ready: Any,
    v_ready: Any,
    k_free: Any,
    v_free: Any,
    turn: Any,
    out_tiles: Any = None,
) -> None:
    pl, plgpu = _pallas()
    *scales, out = others
    lengths = scales.pop(0) if has_lengths else None
    batch, head, me = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
    key_head = lax.div(head, jnp.int32(q.shape[2] // k.shape[2]))
    dim = q.shape[-1]
    stages = min(tile.stages, pl.cdiv(keys, tile.keys))
    count: Any = keys  # of keys that are seen
    whole_tiles: Any = keys // tile.keys
    rest: Any = keys % tile.keys
    if lengths is not None:
        count = lengths[batch]
        if queries_end:  # a block of padding sees no keys
            block_start = lax.axis_index("rows") * (COMPUTE_WARPGROUPS * tile.queries)
            count = jnp.where(block_start < count, count, 0)
        whole_tiles, rest = lax.div(count, jnp.int32(tile.keys)), lax.rem(count, jnp.int32(tile.keys))
    steps = pl.cdiv(count, tile.keys) if lengths is None else pl.cdiv(count, jnp.int32(tile.keys))

    def slot_of(step: Any) -> Any:
        return lax.rem(step, jnp.array(stages, step.dtype))

    def take_turns() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(me < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(_REGISTERS["computing"], action="increase")
        first_row = lax.axis_index("rows") * (COMPUTE_WARPGROUPS * tile.queries) + me * tile.queries
        rows = (batch, pl.ds(first_row, tile.queries), head)  # beyond the last row nothing is read, nothing written
        q_tile = q_tiles.at[me]
        out_tile = q_tile if out_tiles is None else out_tiles.at[me]
        plgpu.copy_gmem_to_smem(q.at[rows], q_tile, q_ready.at[me])
        plgpu.barrier_wait(q_ready.at[me])

        def per_row(number: float) -> Array:
            return plgpu.layout_cast(jnp.full((tile.queries,), number, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        def across(x: Array, columns: int) -> Array:
            return lax.broadcast_in_dim(x, (tile.queries, columns), [0])

        pl.when(steps > 0)(lambda: plgpu.barrier_wait(k_ready.at[0]))
        pl.when(me == 1)(take_turns)

        def visit(
            step: Any, carry: tuple[Array, Array, Array], seen: Any, track_maximum: bool
        ) -> tuple[Array, Array, Array]:
            """`seen`: the number of keys in the tile that are seen; None: all."""
            total, highest, weight = carry
            slot = slot_of(step)
            factor = scale
            if scales:
                block = lax.min(first_row // tile.queries, jnp.int32(scales[0].shape[2] - 1))  # of rows that are there
                factor = scales[0][batch, head, block] * scales[1][batch, key_head, step]

            def multiply(scores: Any) -> Array:
                plgpu.wgmma(scores, q_tile, _transpose_ref(plgpu, k_tiles.at[slot]))
                take_turns()
                return scores[...]

            accumulator = plgpu.ACC((tile.queries, tile.keys), jnp.int32 if scales else jnp.float32)
            scores = pl.run_scoped(multiply, accumulator).astype(jnp.float32)
            plgpu.barrier_arrive(k_free.at[slot])
            if seen is not None:
                column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
                scores = jnp.where(column < seen, scores, -jnp.inf)
            if track_maximum:
                now = jnp.maximum(highest, scores.max(axis=1) * factor)
                fade = jnp.exp2(highest - now)
                shares = jnp.exp2(scores * factor - across(now, tile.keys))
                total, weight, highest = total * across(fade, dim), weight * fade, now
            else:
                shares = jnp.exp2(scores * factor)
            weight += shares.sum(axis=1)
            rounded = shares.astype(v.dtype)
            # The sum before the barriers: otherwise it is put among the products below, which then wait for it.
            total, highest, weight, rounded = lax.optimization_barrier((total, highest, weight, rounded))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[slot])
            plgpu.barrier_wait(turn)

            def add(total: Any) -> None:
                plgpu.wgmma(total, rounded, v_tiles.at[slot])

                @pl.when(step + 1 < steps)
                def _next() -> None:
                    plgpu.barrier_wait(k_ready.at[slot_of(step + 1)])

            total = pl.run_state(add)(plgpu.ACC.init(total))
            plgpu.barrier_arrive(v_free.at[slot])
            return total, highest, weight

        def attend(track_maximum: bool) -> None:
            visit_tile = functools.partial(visit, track_maximum=track_maximum)
            nothing = plgpu.layout_cast(jnp.zeros((tile.queries, dim), jnp.float32), plgpu.Layout.WGMMA)
            carry = (nothing, per_row(-jnp.inf), per_row(0.0))
            carry = lax.fori_loop(0, whole_tiles, functools.partial(visit_tile, seen=None), carry)
            if lengths is not None or rest:  # a loop of one step, because a step must not be a constant
                carry = lax.fori_loop(whole_tiles, steps, functools.partial(visit_tile, seen=rest), carry)
            total, _, weight = carry
            if lengths is not None:
                weight = jnp.maximum(weight, _SMALLEST_WEIGHT)
            out_tile[...] = (total / across(weight, dim)).astype(v.dtype)

        if may_be_small:
            small = is_small[0] > 0
            pl.when(small)(functools.partial(attend, track_maximum=False))
            pl.when(jnp.logical_not(small))(functools.partial(attend, track_maximum=True))
        else:
            attend(track_maximum=True)
        pl.when(me == 0)(take_turns)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(_REGISTERS["fetching"], action="decrease")

        def fetch(step: Any, slot: Any) -> None:
            part = (batch, pl.ds(step * tile.keys, tile.keys), key_head)
            plgpu.copy_gmem_to_smem(k.at[part], k_tiles.at[slot], k_ready.at[slot])
            plgpu.copy_gmem_to_smem(v.at[part], v_tiles.at[slot], v_ready.at[slot])

        for step in range(stages):
            # Not as a number: it would be checked against the length.
            pl.when(step < steps)(functools.partial(fetch, jnp.int32(step), step))

        @pl.loop(stages, steps)
        def _again(step: Any) -> None:
            slot, part = slot_of(step), (batch, pl.ds(step * tile.keys, tile.keys), key_head)
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.copy_gmem_to_smem(k.at[part], k_tiles.at[slot], k_ready.at[slot])
            plgpu.barrier_wait(v_free.at[slot])
            plgpu.copy_gmem_to_smem(v.at[part], v_tiles.at[slot], v_ready.at[slot])
