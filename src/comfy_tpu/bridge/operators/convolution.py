"""Convolutions with every form of padding that torch accepts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Float

from comfy_tpu.bridge.operators.table import operator
from comfy_tpu.bridge.scope import current_trace

F = torch.nn.functional


def _per_axis(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


def _convolution(
    rank: int,
    input: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, " out"] | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
) -> Float[Array, "..."]:
    if input.ndim == rank + 1:
        return _convolution(rank, input[None], weight, bias, stride, padding, dilation, groups)[0]
    strides, dilations = _per_axis(stride, rank), _per_axis(dilation, rank)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = [(r // 2, r - r // 2) for r in reach]
    elif padding == "valid":
        pads = [(0, 0)] * rank
    elif isinstance(padding, str):
        raise RuntimeError(f"Invalid padding string: {padding!r}, expected one of 'same', 'valid'")
    else:
        pads = [(p, p) for p in _per_axis(padding, rank)]
    placement = current_trace().placement
    on_cpu = placement is not None and placement.platform == "cpu"
    if on_cpu and rank == 3 and groups == 1 and strides[0] == dilations[0] == 1:
        out = _conv3d_by_taps(input, weight, strides[1:], pads, dilations[1:])
    else:
        out = jax.lax.conv_general_dilated(
            input,
            weight,
            window_strides=strides,
            padding=pads,
            rhs_dilation=dilations,
            feature_group_count=groups,
        )
    return out if bias is None else out + bias.reshape((-1,) + (1,) * rank)


def _conv3d_by_taps(
    input: Float[Array, "b c t h w"],
    weight: Float[Array, "o c kt kh kw"],
    strides: tuple[int, ...],
    pads: Sequence[tuple[int, int]],
    dilations: tuple[int, ...],
) -> Float[Array, "b o t2 h2 w2"]:
    """The frames under a kernel as channels of one picture: XLA's own 3-D convolution is 4 to 7 times slower on a CPU
    (16 channels, 6 frames of 64×64: 119 ms against 18)."""
    batch, channels, _, height, width = input.shape
    features, _, taps, *kernel = weight.shape
    x = jnp.pad(input, ((0, 0), (0, 0), pads[0], (0, 0), (0, 0))).transpose(0, 2, 3, 4, 1)
    frames = x.shape[1] - taps + 1
    seen = jnp.concatenate([x[:, tap : tap + frames] for tap in range(taps)], axis=-1)
    out = jax.lax.conv_general_dilated(
        seen.reshape(batch * frames, height, width, taps * channels),
        weight.transpose(3, 4, 2, 1, 0).reshape(*kernel, taps * channels, features),
        window_strides=strides,
        padding=pads[1:],
        rhs_dilation=dilations,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return out.reshape(batch, frames, *out.shape[1:]).transpose(0, 4, 1, 2, 3)


@operator(F.conv1d)
def conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups)


@operator(F.conv2d)
def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups)


@operator(F.conv3d)
def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups)
