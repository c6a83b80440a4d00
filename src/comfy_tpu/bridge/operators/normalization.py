"""Normalisations. Statistics are float32 whatever the input is, as in PyTorch's CPU and CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Float

from comfy_tpu.bridge.operators.table import operator
from comfy_tpu.errors import UnsupportedError

F = torch.nn.functional
aten = torch.ops.aten


def _scale_and_shift(
    x: Float[Array, "..."], weight: Float[Array, "..."] | None, bias: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    if weight is not None:
        x = x * weight.astype(x.dtype)
    if bias is not None:
        x = x + bias.astype(x.dtype)
    return x


def _compute_dtype(x: Float[Array, "..."]) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


@operator(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Float[Array, "..."],
    normalized_shape: Sequence[int],
    weight: Float[Array, "..."] | None = None,
    eps: float | None = None,
) -> Float[Array, "..."]:
    axes = _normalized_axes(input, normalized_shape)
    x = input.astype(_compute_dtype(input))
    epsilon = jnp.finfo(x.dtype).eps if eps is None else eps
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + epsilon)
    return _scale_and_shift(x, weight, None).astype(input.dtype)


def _normalized_axes(x: Float[Array, "..."], normalized_shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"normalized_shape={shape} must be the end of the input's shape {x.shape}")
    return tuple(range(x.ndim - len(shape), x.ndim))


@operator(aten.native_layer_norm.default)
def native_layer_norm(
    input: Float[Array, "..."],
    normalized_shape: Sequence[int],
    weight: Float[Array, "..."] | None,
    bias: Float[Array, "..."] | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    axes = _normalized_axes(input, normalized_shape)
    x = input.astype(_compute_dtype(input))
    mean = jnp.mean(x, axes, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axes, keepdims=True) + eps)
    return _scale_and_shift(centred * rstd, weight, bias).astype(input.dtype), mean, rstd


@operator(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Float[Array, "..."],
    normalized_shape: Sequence[int],
    weight: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Float[Array, "..."]:
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@operator(aten.native_group_norm.default)
def native_group_norm(
    input: Float[Array, "n c ..."],
    weight: Float[Array, " c"] | None,
    bias: Float[Array, " c"] | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    x = input.astype(_compute_dtype(input)).reshape(N, group, -1)
    mean = jnp.mean(x, 2, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, 2, keepdims=True) + eps)
    per_channel = (1, C) + (1,) * (input.ndim - 2)
    weight, bias = (None if p is None else p.reshape(per_channel) for p in (weight, bias))
    out = _scale_and_shift((centred * rstd).reshape(input.shape), weight, bias)
    return out.astype(input.dtype), mean[..., 0], rstd[..., 0]


@operator(F.group_norm, torch.group_norm)
def group_norm(
    input: Float[Array, "n c ..."],
    num_groups: int,
    weight: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Float[Array, "n c ..."]:
    n, c = input.shape[:2]
    if c % num_groups:
        raise ValueError(f"channels={c} is not divisible by num_groups={num_groups}")
    return native_group_norm(input, weight, bias, n, c, input.size // max(n * c, 1), num_groups, eps)[0]


@operator(F.dropout, torch.dropout, on_torch=True)
def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    _check_inference(p, training)
    return input  # itself, as in torch


@operator(aten.native_dropout.default)
def native_dropout(input: Float[Array, "..."], p: float, train: bool | None) -> tuple[Array, Array]:
    _check_inference(p, train)
    return input, jnp.ones(input.shape, bool)


def _check_inference(p: float, train: bool | None) -> None:
    if p > 0 and train is not False:
        raise UnsupportedError(
            f"dropout(p={p}) is training; programs are for inference, where dropout is the identity: call model.eval()"
        )


@operator(F.normalize)
def normalize(
    input: Float[Array, "..."], p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Float[Array, "..."]:
    """torch's `normalize`, computed along the last axis, which is contiguous after a convolution on a CPU."""
    x = jnp.moveaxis(input, dim, -1)
    length = jnp.linalg.norm(x, p, -1, keepdims=True)
    return jnp.moveaxis(x / jnp.maximum(length, eps), -1, dim)
