"""A branch by a tensor's value in a function that the model calls, and in a submodule."""

import torch


def scaled(x, by):
    if by > 1:  # trap: tensor-condition
        return x * by
    return x


class CarelessInner(torch.nn.Module):
    def forward(self, x: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
        if limit > 0 and x.sum() > limit:  # trap: tensor-condition
            return x
        return -x


class CarefulInner(torch.nn.Module):
    def forward(self, x: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
        if limit > 0:
            return torch.where(x.sum() > limit, x, -x)
        return -x


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CarelessInner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(scaled(x, x.mean()))


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CarefulInner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(scaled(x, 2.0))
