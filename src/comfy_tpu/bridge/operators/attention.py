"""`scaled_dot_product_attention` through our kernels, on the mesh of the trace."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jaxtyping import Array, Float, Shaped

from comfy_tpu.bridge.operators.table import operator
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.kernels import attention


@operator(torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    query: Float[Array, "... lq d"],
    key: Float[Array, "... lk d"],
    value: Float[Array, "... lk dv"],
    attn_mask: Shaped[Array, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Array, "... lq dv"]:
    if dropout_p > 0:
        raise UnsupportedError(f"attention with dropout_p={dropout_p}: programs are for inference; call model.eval()")
    if query.ndim != 4:
        return _attend_any_rank(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    trace = current_trace()
    return attention(
        query,
        key,
        value,
        placement=trace.placement,
        config=trace.attention,
        mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _attend_any_rank(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Array:
    """Attention for any number of leading dimensions, as torch accepts; the kernels take exactly batch and heads."""
    heads = 1 if query.ndim < 4 else query.shape[-3]
    leading = query.shape[:-2] if query.ndim < 4 else query.shape[:-3]

    def fold(x: Array) -> Array:
        return x.reshape((-1, x.shape[-3] if query.ndim > 4 else 1, *x.shape[-2:]))

    if mask is not None and mask.ndim > 2:
        mask = jnp.broadcast_to(
            mask, (*leading, heads, *mask.shape[-2:]) if query.ndim > 4 else (*leading, *mask.shape[-2:])
        )
        mask = mask.reshape((-1, heads, *mask.shape[-2:]))
    out = scaled_dot_product_attention(fold(query), fold(key), fold(value), mask, 0.0, is_causal, scale, enable_gqa)
    return out.reshape((*query.shape[:-1], value.shape[-1]))
