"""A result that is wider than what came in."""

import torch


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()  # trial: dtype-drift
        return self.linear(x) + wide.square().mean(-1, keepdim=True)


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.linear(x) + wide.square().mean(-1, keepdim=True).to(x.dtype)
