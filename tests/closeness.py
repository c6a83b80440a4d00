"""How close two videos or pictures are, and that the comparison would see a wrong one."""

from collections.abc import Mapping

import torch

SAME = 100
"""dB, in float32: over 105 are found between diffusers and us, one device and a mesh. A bound is worth what a wrong
result would be measured at: `assert_wrong_ones_differ` says that for the small models of a test."""


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    """dB, of values in 0..1."""
    assert one.shape == other.shape
    return float(-10 * torch.log10(((one - other) ** 2).mean().clamp_min(1e-20)))


def assert_wrong_ones_differ(expected: torch.Tensor, below: float, **wrong: torch.Tensor) -> None:
    """Each of `wrong`, made with another prompt, seed and the like, is less than `below` dB from `expected`."""
    found: Mapping[str, float] = {name: psnr(made, expected) for name, made in wrong.items()}
    assert max(found.values()) < below, f"the comparison with {below} dB would not see it: {found}"
