"""Shapes that depend on values."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = torch.nonzero(x > 0)  # trap: data-dependent-shape
        values = x.unique()  # trap: data-dependent-shape
        positive = torch.masked_select(x, x > 0)  # trap: data-dependent-shape
        rows, *_ = torch.where(x > 0)  # trap: data-dependent-shape
        times = (x[:, 0, 0] > 0).long() + 1
        repeated = torch.repeat_interleave(x, times, dim=0)  # trap: data-dependent-shape
        return where.sum() + values.sum() + positive.sum() + rows.sum() + repeated.sum()


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = torch.topk(x, 2).values
        fixed = torch.unique(torch.tensor([1, 2, 2])).sum()
        repeated = torch.repeat_interleave(x, 2, dim=0)
        return torch.where(x > 0, x, 0).sum() + best.sum() + repeated.sum() + fixed
