"""An assert about values."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max() <= 100, "too large"  # trap: tensor-assert
        torch._assert(x.min() >= -100, "too small")  # trap: tensor-assert
        return x * 2


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 3, f"x has {x.ndim} dimensions, expected 3"
        assert x.dtype.is_floating_point
        torch._assert(x.shape[-1] == 8, "not eight")
        return x * 2
