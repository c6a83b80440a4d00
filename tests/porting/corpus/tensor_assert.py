"""An assert about values."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max() <= 100, "too large"  # trap: tensor-assert
        return x * 2


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 3, f"x has {x.ndim} dimensions, expected 3"
        assert x.dtype.is_floating_point
        return x * 2
