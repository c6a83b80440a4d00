"""Convolutions with every form of padding that torch accepts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import torch
from jaxtyping import Array, Float

from comfy_tpu.bridge.operators.table import operator
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.kernels.convolution import conv3d_by_taps

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
    convolve = functools.partial(jax.lax.conv_general_dilated, rhs_dilation=dilations, feature_group_count=groups)
    by_taps = on_cpu and rank == 3 and groups == 1
    # XLA turns a CPU's 2-D convolutions to channels last by itself, but not inside a loop. Over a mesh it parts those
    # wrongly where a device has few columns (64 pixels of the 5B's image over eight: 44 dB, where all else has 130).
    turned = on_cpu and rank == 2 and placement is not None and placement.mesh.size == 1
    if not (by_taps or turned):
        out = convolve(input, weight, strides, pads)
        return out if bias is None else out + bias.reshape((-1,) + (1,) * rank)
    space = tuple(range(2, rank + 2))
    last, kernel = input.transpose(0, *space, 1), weight.transpose(*space, 1, 0)
    if by_taps:
        out = conv3d_by_taps(last, kernel, strides, pads, dilations)
    else:
        out = convolve(last, kernel, strides, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (out if bias is None else out + bias).transpose(0, rank + 1, *range(1, rank + 1))


@operator(F.conv1d)
def conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups)


@operator(F.conv2d)
def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups)


@operator(F.conv3d)
def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups)
