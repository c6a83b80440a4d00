"""NVIDIA Hopper: flash attention in Pallas (Mosaic GPU), for long sequences that see every key, or the first ones.

The algorithm is FlashAttention-3 (Shah et al., 2024). A block of threads owns some query rows. One warpgroup requests
tiles of keys and values (`_Ring`). Two others compute, each on its own rows, and alternate (`_Turns`): one uses the
tensor cores while the other is at the softmax. docs/design.md says what else the kernel owes to whom, and why the
kernel that JAX ships does not do.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    out = _attention(flag, q, k, v, lengths, scales, _Plan(keys, scale, tile, may_be_small, queries_end))
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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known of a call when its kernel is built."""

    keys: int
    scale: float
    """The factor of scores as base-2 exponents."""
    tile: Tile
    may_be_small: bool
    """Whether the kernel reads `is_small`. If not, it tracks the running maximum."""
    queries_end: bool

    @property
    def stages(self) -> int:
        return min(self.tile.stages, -(-self.keys // self.tile.keys))


@functools.partial(jax.jit, static_argnames=("plan",))
def _attention(
    is_small: Array, q: Array, k: Array, v: Array, lengths: Array | None, scales: tuple[Array, ...], plan: _Plan
) -> Array:
    """Attention over arrays [B, L, H, D]. `lengths`: between 0 and `plan.keys`.

    `scales`: of queries and keys in 8 bits, [B, H, tiles] each. `is_small`, one number: whether scores are so small
    that they need no running maximum. The kernel reads it itself: with `lax.cond` the device would wait for the host in
    every layer.
    """
    pl, plgpu = _pallas()
    batch, queries, heads, dim = q.shape
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, has_lengths=lengths is not None),
        out_type=jax.ShapeDtypeStruct(q.shape, v.dtype),
        # Heads first: 601 TFLOP/s where rows first, with all blocks after the same keys at the same time, has 490.
        grid=(heads, pl.cdiv(queries, COMPUTE_WARPGROUPS * plan.tile.queries), batch),
        grid_names=("head", "rows", "batch"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plgpu, dim, q.dtype, v.dtype, plan.tile),
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


class _Ring(NamedTuple):
    """Keys, or values, on their way through shared memory: tile n passes through slot n modulo the number of slots."""

    rows: Callable[[Any], Any]
    """The number of a tile -> its rows in global memory."""
    tiles: Any
    ready: Any
    free: Any

    def request(self, number: Any, slot: Any) -> None:
        _pallas()[1].copy_gmem_to_smem(self.rows(number), self.tiles.at[slot], self.ready.at[slot])

    def await_tile(self, slot: Any) -> None:
        _pallas()[1].barrier_wait(self.ready.at[slot])

    def release(self, slot: Any) -> None:
        _pallas()[1].barrier_arrive(self.free.at[slot])

    def await_release(self, slot: Any) -> None:
        _pallas()[1].barrier_wait(self.free.at[slot])


class _Turns(NamedTuple):
    """The computing warpgroups meet twice a tile, and whoever was at the softmax has the tensor cores next.

    One of them meets once more at its start, and the other at its end. That puts them half a tile apart.
    """

    barrier: Any

    def meet(self, before_waiting: Callable[[], None] | None = None) -> None:
        _, plgpu = _pallas()
        plgpu.barrier_arrive(self.barrier)
        if before_waiting is not None:
            before_waiting()
        plgpu.barrier_wait(self.barrier)


class _Softmax(NamedTuple):
    """What some query rows know after the keys so far."""

    total: Array
    """float32 [queries, dim]: the weighted sum of values."""
    maximum: Array
    """float32 [queries]"""
    weight: Array
    """float32 [queries]"""

    @classmethod
    def empty(cls, queries: int, dim: int) -> _Softmax:
        _, plgpu = _pallas()
        layout = plgpu.Layout.WGMMA

        def fill(number: float, shape: tuple[int, ...], layout: Any) -> Array:
            return plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)

        by_row = [fill(number, (queries,), layout.reduce(1)) for number in (-jnp.inf, 0.0)]
        return cls(fill(0.0, (queries, dim), layout), *by_row)

    def weigh(self, scores: Array, factor: Any, track_maximum: bool) -> tuple[_Softmax, Array]:
        """The state with the weights of a tile of keys added, and these: 2 to the power of `scores` times `factor`."""
        total, maximum, weight = self
        if track_maximum:
            maximum = jnp.maximum(self.maximum, scores.max(axis=1) * factor)
            fade = jnp.exp2(self.maximum - maximum)
            weights = jnp.exp2(scores * factor - _spread(maximum, scores))
            total, weight = total * _spread(fade, total), weight * fade
        else:
            weights = jnp.exp2(scores * factor)
        return _Softmax(total, maximum, weight + weights.sum(axis=1)), weights


def _spread(per_row: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(per_row, like.shape, [0])


class _Steps(NamedTuple):
    """The tiles of keys that a block of threads visits."""

    whole: Any
    """The number of tiles whose keys are all seen."""
    total: Any
    rest: Any
    """The number of keys that are seen in the tile after those."""


def _count_steps(plan: _Plan, length: Any, first_row: Any) -> _Steps:
    """`length`: the keys that are seen, where only the device knows it. `first_row`: of the block's queries."""
    pl, _ = _pallas()
    size, seen = plan.tile.keys, plan.keys
    if length is None:
        return _Steps(seen // size, pl.cdiv(seen, size), seen % size)
    if plan.queries_end:  # a block of padding sees no keys
        length = jnp.where(first_row < length, length, 0)
    rows = jnp.int32(size)
    return _Steps(lax.div(length, rows), pl.cdiv(length, rows), lax.rem(length, rows))


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The work of one computing warpgroup: its query rows against the keys of their head."""

    plan: _Plan
    steps: _Steps
    queries: Any
    keys: _Ring
    values: _Ring
    turns: _Turns
    factor: Callable[[Any], Any]
    """The number of a tile -> the factor of its scores as base-2 exponents."""
    score_dtype: Any

    def attend(self, track_maximum: bool) -> _Softmax:
        queries, dim = self.queries.shape
        state = _Softmax.empty(queries, dim)
        visit = functools.partial(self._visit, track_maximum=track_maximum)
        whole, total, rest = self.steps
        state = lax.fori_loop(0, whole, functools.partial(visit, seen=None), state)
        if isinstance(rest, int) and not rest:
            return state
        # A loop of one step at most: the number of a step must not be a constant.
        return lax.fori_loop(whole, total, functools.partial(visit, seen=rest), state)

    def _visit(self, step: Any, state: _Softmax, *, seen: Any, track_maximum: bool) -> _Softmax:
        """`seen`: the number of keys in the tile that are seen; None: all."""
        slot = _slot(self.plan, step)
        factor = self.factor(step)
        scores = self._score(slot).astype(jnp.float32)
        self.keys.release(slot)
        if seen is not None:
            scores = _hide_from(scores, seen)
        state, weights = state.weigh(scores, factor, track_maximum)
        # Sums of weights before the barriers: the compiler puts them among the products below otherwise, which then
        # wait for them.
        state, rounded = lax.optimization_barrier((state, weights.astype(self.values.tiles.dtype)))
        self.turns.meet(before_waiting=lambda: self.values.await_tile(slot))
        total = self._add_values(state.total, rounded, slot, step)
        self.values.release(slot)
        return state._replace(total=total)

    def _score(self, slot: Any) -> Array:
        pl, plgpu = _pallas()

        def multiply(scores: Any) -> Array:
            plgpu.wgmma(scores, self.queries, _transpose_ref(plgpu, self.keys.tiles.at[slot]))
            self.turns.meet()  # while the product is under way; reading the scores waits for it
            return scores[...]

        shape = (self.plan.tile.queries, self.plan.tile.keys)
        return pl.run_scoped(multiply, plgpu.ACC(shape, self.score_dtype))

    def _add_values(self, total: Array, weights: Array, slot: Any, step: Any) -> Array:
        pl, plgpu = _pallas()

        def multiply(total: Any) -> None:
            plgpu.wgmma(total, weights, self.values.tiles.at[slot])
            # The product hides the wait for the keys of the next step.
            pl.when(step + 1 < self.steps.total)(lambda: self.keys.await_tile(_slot(self.plan, step + 1)))

        return pl.run_state(multiply)(plgpu.ACC.init(total))


def _slot(plan: _Plan, step: Any) -> Any:
    return lax.rem(step, jnp.array(plan.stages, step.dtype))


def _hide_from(scores: Array, end: Any) -> Array:
    _, plgpu = _pallas()
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(column < end, scores, -jnp.inf)


def _transpose_ref(plgpu: Any, ref: Any) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))  # before jax 0.11


def _kernel(
    is_small: Any,
    q: Any,
    k: Any,
    v: Any,
    *others: Any,
    plan: _Plan,
    has_lengths: bool,
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
    batch, head, warpgroup = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
    key_head = lax.div(head, jnp.int32(q.shape[2] // k.shape[2]))
    block_row = lax.axis_index("rows") * (COMPUTE_WARPGROUPS * plan.tile.queries)
    steps = _count_steps(plan, None if lengths is None else lengths[batch], block_row)

    def tile_rows(array: Any, number: Any) -> Any:
        return array.at[batch, pl.ds(number * plan.tile.keys, plan.tile.keys), key_head]

    keys = _Ring(functools.partial(tile_rows, k), k_tiles, k_ready, k_free)
    values = _Ring(functools.partial(tile_rows, v), v_tiles, v_ready, v_free)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(_REGISTERS["computing"], action="increase")
        first_row = block_row + warpgroup * plan.tile.queries
        global_rows = (batch, pl.ds(first_row, plan.tile.queries), head)  # nothing is read or written beyond the last
        queries = q_tiles.at[warpgroup]
        result = queries if out_tiles is None else out_tiles.at[warpgroup]
        plgpu.copy_gmem_to_smem(q.at[global_rows], queries, q_ready.at[warpgroup])
        plgpu.barrier_wait(q_ready.at[warpgroup])

        def factor(step: Any) -> Any:
            if not scales:
                return plan.scale
            by_query, by_key = scales
            block = lax.min(first_row // plan.tile.queries, jnp.int32(by_query.shape[2] - 1))  # of rows that exist
            return by_query[batch, head, block] * by_key[batch, key_head, step]

        score_dtype = jnp.int32 if scales else jnp.float32
        turns = _Turns(turn)
        rows = _Rows(plan, steps, queries, keys, values, turns, factor, score_dtype)

        def attend(track_maximum: bool) -> None:
            total, _, weight = rows.attend(track_maximum)
            if has_lengths:
                weight = jnp.maximum(weight, _SMALLEST_WEIGHT)
            result[...] = (total / _spread(weight, total)).astype(result.dtype)

        pl.when(steps.total > 0)(lambda: keys.await_tile(0))
        pl.when(warpgroup == 1)(turns.meet)
        if plan.may_be_small:
            small = is_small[0] > 0
            pl.when(small)(lambda: attend(track_maximum=False))
            pl.when(jnp.logical_not(small))(lambda: attend(track_maximum=True))
        else:
            attend(track_maximum=True)
        pl.when(warpgroup == 0)(turns.meet)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, out.at[global_rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(_REGISTERS["fetching"], action="decrease")

        def request(number: Any, slot: Any, is_used: bool) -> None:
            for ring in (keys, values):
                if is_used:
                    ring.await_release(slot)
                ring.request(number, slot)

        for slot in range(plan.stages):
            # Not a Python number: Pallas would check its rows against the length.
            pl.when(slot < steps.total)(functools.partial(request, jnp.int32(slot), slot, is_used=False))
        pl.loop(plan.stages, steps.total)(lambda step: request(step, _slot(plan, step), is_used=True))
