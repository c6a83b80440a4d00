"""How close two videos or images are, and that the comparison would see a wrong one."""

from collections.abc import Mapping

import numpy as np
import torch

SAME = 100
"""dB, in float32: over 105 are found between diffusers and us, one device and a mesh. A bound is worth what a wrong
result would be measured at: `assert_wrong_ones_differ` says that for the small models of a test."""


def psnr(one: torch.Tensor | np.ndarray, other: torch.Tensor | np.ndarray, *, span: float = 1.0) -> float:
    """dB, of values that lie `span` apart; 200 where they are equal."""
    assert one.shape == other.shape, (one.shape, other.shape)
    error = np.square(_as_float64(one) - _as_float64(other)).mean() / span**2
    return float(-10 * np.log10(np.maximum(error, 1e-20)))


def _as_float64(values: torch.Tensor | np.ndarray) -> np.ndarray:
    return values.double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, np.float64)


def assert_wrong_ones_differ(expected: torch.Tensor, below: float, **wrong: torch.Tensor) -> None:
    """Each of `wrong`, made with another prompt, seed and the like, is less than `below` dB from `expected`."""
    found: Mapping[str, float] = {name: psnr(made, expected) for name, made in wrong.items()}
    assert max(found.values()) < below, f"the comparison with {below} dB would not see it: {found}"
