"""Rows chosen by a mask."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[..., 0] > 0
        return x[mask].sum(0) + x[~mask].sum(0)  # trap: mask-indexing


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[..., 0] > 0
        y = x.clone()
        y[y > 2] = 0
        order = torch.tensor([1, 0], device=x.device)
        return torch.where(mask.unsqueeze(-1), y, 0).sum((0, 1)) + y[order].sum((0, 1))
