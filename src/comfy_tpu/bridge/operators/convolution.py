"""Convolutions with every form of padding that torch accepts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import torch
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from comfy_tpu.bridge.operators.table import operator
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.kernels.convolution import conv3d_by_taps
from comfy_tpu.parallel.constraints import constrain
from comfy_tpu.parallel.placement import Placement

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
    input = _gather_short_sides(input, weight, strides, placement)
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


def _gather_short_sides(
    input: Float[Array, "..."], weight: Float[Array, "..."], strides: Sequence[int], placement: Placement | None
) -> Float[Array, "..."]:
    """Keeps sides whole that have fewer results than the kernel has taps, or than the mesh has devices.

    Shardy would also divide the kernel along them (it counts the taps as a factor of the input's side), and XLA's
    partitioned convolution is then wrong: 2×4 latents of the 5B's image over sp=4, divided by its attention, were off
    by 0.38, with jax 0.10.2 and 0.12.
    """
    if placement is None or placement.sizes.device_count == 1:
        return input
    sides = zip(input.shape[2:], weight.shape[2:], strides, strict=True)
    short = [taps > 1 and size // stride < max(taps, placement.sizes.device_count) for size, taps, stride in sides]
    if not any(short):
        return input
    free = PartitionSpec.UNCONSTRAINED
    return constrain(input, placement, PartitionSpec(free, free, *(None if each else free for each in short)))


@operator(F.conv1d)
def conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups)


@operator(F.conv2d)
def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups)


@operator(F.conv3d)
def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups)
