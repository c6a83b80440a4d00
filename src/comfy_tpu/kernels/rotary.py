"""Rotary position embedding for TPU: a forward Pallas kernel that reads and writes every element once.

Why a kernel: pairs are a dimension of two, for which XLA changes the layout of the whole array and back. Here a pair's
values stay in their lanes, and one permutation of lanes brings each to the other's place. Between the product that
makes the queries and the all-to-all, for 18,900 rows of 40 heads of 128 in bfloat16, the TPU compiler (libtpu 0.0.51,
v6e; nothing ran on a TPU) schedules nine programs of 1,200,000 bundles for XLA's rotation, and for this kernel 202,404,
or 345,153 with the norm. Reading and writing the array takes as long as 413,000.

The heads stay side by side in the columns, as a linear layer leaves them and as the next transfer takes them. The
result is already split into the groups of heads that an all-to-all over the sequence axis sends, so nothing is copied
before it. The RMS norm of queries and keys, which comes before the rotation in most models, is part of the same pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels.tuning import LANES, MIB, vmem_limit

_HALF = LANES // 2

# Rows of a step: a whole register of bfloat16. Four steps are unrolled, or each waits for its permutations and the sum
# over its columns: 202,404 bundles instead of 224,604, with the norm 345,153 instead of 403,388.
_STEP_ROWS = 16
_UNROLLED = 4

# A block has rows of full width, 256 of them at 5,120 columns in bfloat16. The kernel holds four blocks, 10.6 MiB: two
# in use and two in transfer. Blocks of 64, 128 and 512 rows: 215,798, 209,138 and 199,037 bundles.
_BLOCK_BYTES = 5 * MIB // 2
_LARGEST_BLOCK_ROWS = 1024


def rotate_heads(
    x: Float[Array, "batch rows columns"],
    cosine: Float[Array, "rows pairs"],
    sine: Float[Array, "rows pairs"],
    *,
    head_dim: int,
    chip: str,
    interpret: bool,
    groups: int = 1,
    padded_rows: int | None = None,
    weight: Float[Array, " columns"] | None = None,
    epsilon: float | None = None,
    inverse_rms: Float[Array, "batch rows 1"] | None = None,
) -> Float[Array, "groups batch padded_rows group_columns"]:
    """Applies RoPE to neighbouring pairs of each head, in float32, and splits the heads into equal `groups`.

    `x` has its heads side by side in the columns. The tables hold a value for each pair of a head, the same for all
    heads and sequences. The result has the dtype of `x`. Rows beyond those of `x`, up to `padded_rows`, hold anything.

    With `epsilon`, `x` goes through an RMS norm over its columns first, as in torch's `rms_norm`: computed in float32
    and rounded to the dtype of `x` before the rotation. `inverse_rms` is for a row whose columns are on several
    devices: float32 1/√(mean of squares + epsilon), by the caller. `weight` belongs to the norm.

    Raises InvalidValueError for shapes and options that do not fit together.
    """
    _check(x, cosine, sine, head_dim, groups, padded_rows, weight, epsilon, inverse_rms)
    batch, rows, columns = x.shape
    group_columns = columns // groups
    padded_rows = rows if padded_rows is None else padded_rows
    block = _block_rows(columns * x.dtype.itemsize, padded_rows)
    # One table of whole lanes: two of half the width would each be padded to as much, 9.7 MB at 18,900 rows.
    table = jnp.concatenate((cosine, sine), axis=1).astype(jnp.float32)

    # Blocks of rows are the outer dimension: a block of the table is fetched once for all sequences.
    in_specs = [
        pl.BlockSpec((None, block, columns), lambda i, b: (b, i, 0)),
        pl.BlockSpec((block, head_dim), lambda i, b: (i, 0)),
    ]
    operands = [x, table]
    if inverse_rms is not None:
        in_specs.append(pl.BlockSpec((None, block, 1), lambda i, b: (b, i, 0)))
        operands.append(inverse_rms.astype(jnp.float32))
    if weight is not None:
        in_specs.append(pl.BlockSpec((1, columns), lambda i, b: (0, 0)))
        operands.append(weight.astype(jnp.float32).reshape(1, columns))

    is_normed = epsilon is not None or inverse_rms is not None
    result: Array = pl.pallas_call(
        functools.partial(
            _kernel,
            head_dim=head_dim,
            epsilon=epsilon,
            has_inverse_rms=inverse_rms is not None,
            has_weight=weight is not None,
        ),
        out_shape=jax.ShapeDtypeStruct((groups, batch, padded_rows, group_columns), x.dtype),
        grid=(pl.cdiv(padded_rows, block), batch),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((groups, None, block, group_columns), lambda i, b: (0, b, i, 0)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_limit(chip)
        ),
        # XLA cannot look inside; without this its scheduler takes the kernel for free and hides no transfer behind it.
        cost_estimate=pl.CostEstimate(
            flops=(7 if is_normed else 3) * x.size,
            transcendentals=batch * rows if epsilon is not None else 0,
            bytes_accessed=x.nbytes + sum(operand.nbytes for operand in operands),
        ),
        interpret=interpret,
        name="comfy_tpu_rotary",
    )(*operands)
    return result


def _check(
    x: Array,
    cosine: Array,
    sine: Array,
    head_dim: int,
    groups: int,
    padded_rows: int | None,
    weight: Array | None,
    epsilon: float | None,
    inverse_rms: Array | None,
) -> None:
    if x.ndim != 3 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise InvalidValueError(
            f"x is {x.dtype}{list(x.shape)}; expected bfloat16 or float32 [batch, rows, heads·head_dim]", field="x"
        )
    batch, rows, columns = x.shape
    if head_dim <= 0 or head_dim % LANES:
        raise InvalidValueError(
            f"head_dim={head_dim} is not a multiple of {LANES}; a head must be whole lanes; rotate such heads with "
            "bridge.rotate_pairs",
            field="head_dim",
        )
    if not columns or columns % head_dim:
        raise InvalidValueError(f"x has {columns} columns; expected whole heads of head_dim={head_dim}", field="x")
    if groups <= 0 or columns // head_dim % groups:
        raise InvalidValueError(
            f"heads={columns // head_dim} is not divisible by groups={groups}; expected groups of as many heads each",
            field="groups",
        )
    most = pl.cdiv(rows, _STEP_ROWS) * _STEP_ROWS  # further rows could be a block of which x has nothing
    if padded_rows is not None and not rows <= padded_rows <= most:
        raise InvalidValueError(
            f"padded_rows={padded_rows} does not suit the {rows} rows of x; expected {rows} to {most}",
            field="padded_rows",
        )
    for name, table in (("cosine", cosine), ("sine", sine)):
        if table.shape != (rows, head_dim // 2):
            raise InvalidValueError(
                f"{name} has shape {list(table.shape)}; expected a value for each row and pair, "
                f"{[rows, head_dim // 2]}",
                field=name,
            )
    if epsilon is not None and inverse_rms is not None:
        raise InvalidValueError("epsilon and inverse_rms were both given; expected one of them", field="inverse_rms")
    if inverse_rms is not None and inverse_rms.shape != (batch, rows, 1):
        raise InvalidValueError(
            f"inverse_rms has shape {list(inverse_rms.shape)}; expected {[batch, rows, 1]}", field="inverse_rms"
        )
    if weight is not None and epsilon is None and inverse_rms is None:
        raise InvalidValueError(
            "weight was given without a norm; pass epsilon, or inverse_rms where columns are on several devices",
            field="weight",
        )
    if weight is not None and weight.shape != (columns,):
        raise InvalidValueError(f"weight has shape {list(weight.shape)}; expected {[columns]}", field="weight")


def _block_rows(row_bytes: int, rows: int) -> int:
    """Rows of a block: whole unrolled steps, at least one, and no more of them than hold all rows."""
    step = _STEP_ROWS * _UNROLLED
    fitting = min(_BLOCK_BYTES // row_bytes, _LARGEST_BLOCK_ROWS, pl.cdiv(rows, step) * step)
    return max(fitting // step, 1) * step


def _kernel(
    x_ref: Any,
    table_ref: Any,
    *refs: Any,
    head_dim: int,
    epsilon: float | None,
    has_inverse_rms: bool,
    has_weight: bool,
) -> None:
    inverse_rms_ref = refs[0] if has_inverse_rms else None
    weight_ref = refs[has_inverse_rms] if has_weight else None
    out_ref = refs[-1]
    block, columns = x_ref.shape
    group_columns = out_ref.shape[2]
    lane = lax.broadcasted_iota(jnp.int32, (_STEP_ROWS, LANES), 1)

    def permute(values: Array, lanes: Array) -> Array:
        return jnp.take_along_axis(values, lanes, axis=1, mode="promise_in_bounds")

    def read_pairs(rows: Any, start: int) -> Array:
        """64 values of the table, each for two neighbouring lanes."""
        first = start // LANES * LANES
        return permute(table_ref[rows, first : first + LANES], (lane >> 1) + start % LANES)

    def rotate_rows(step: Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(step * _STEP_ROWS, _STEP_ROWS), _STEP_ROWS)
        # For a head's first 128 columns, its second, ...: loaded and spread once for all heads.
        cosines, sines = [], []
        for start in range(0, head_dim // 2, _HALF):
            cosines.append(read_pairs(rows, start))
            sine = read_pairs(rows, head_dim // 2 + start)
            sines.append(jnp.where((lane & 1) == 0, -sine, sine))

        inverse_rms = None
        if inverse_rms_ref is not None:
            inverse_rms = inverse_rms_ref[rows, :]
        elif epsilon is not None:
            squares = jnp.zeros((_STEP_ROWS, LANES), jnp.float32)
            for start in range(0, columns, LANES):
                squares += jnp.square(x_ref[rows, start : start + LANES].astype(jnp.float32))
            inverse_rms = lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / columns + epsilon)

        for start in range(0, columns, LANES):
            values = x_ref[rows, start : start + LANES].astype(jnp.float32)
            if inverse_rms is not None:
                values *= inverse_rms
                if weight_ref is not None:
                    values *= weight_ref[:, start : start + LANES]
                values = values.astype(x_ref.dtype).astype(jnp.float32)
            part = start % head_dim // LANES
            # A permutation, not a product with a matrix of ones: NaN stays in its pair. Two rolls and a selection take
            # 272,412 bundles. Permuting bfloat16 instead saves 8 % with the norm on v6e and costs 40 % on v5e.
            rotated = values * cosines[part] + permute(values, lane ^ 1) * sines[part]
            group, column = divmod(start, group_columns)
            out_ref[group, rows, column : column + LANES] = rotated.astype(out_ref.dtype)

    lax.fori_loop(0, block // _STEP_ROWS, rotate_rows, None, unroll=_UNROLLED)
