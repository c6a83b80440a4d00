"""A tensor that __init__ makes and that is no buffer."""

import torch


class Trapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Linear(8, 8).weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table  # trial: meta-tensor


class Mended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.nn.Linear(8, 8).weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table
