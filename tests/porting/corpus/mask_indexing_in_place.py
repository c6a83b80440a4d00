"""Rows chosen by a mask and changed where they are, which reads them first."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x > 0] += 1  # trap: mask-indexing
        return y


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 1:3] += 1
        y[y > 2] = 0
        return y + (x > 0)
