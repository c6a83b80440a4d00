"""A table on the host that is larger than a constant may be."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.ones(2_200_000, 8)
        return x + (table * x[0, 0]).mean(0)  # trial: large-constant


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.ones(2_200_000, 8, device=x.device, dtype=x.dtype)
        return x + (table * x[0, 0]).mean(0)
