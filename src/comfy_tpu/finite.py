"""Whether tensors hold NaN or infinity. Needs no jax."""

from __future__ import annotations

import torch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every number of a host tensor is finite.

    Looks at the minimum and the maximum, which are NaN if any number is: 15 to 25 times as fast as `isfinite().all()`,
    which writes an array of booleans first (16 million numbers, two x86-64 cores).
    """
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:  # torch compares no 8-bit floats
        tensor = tensor.float()
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))
