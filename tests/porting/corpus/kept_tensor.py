"""Tables that are made once for all calls."""

import functools

import torch

SCALES = {}


@functools.lru_cache
def positions(count, device):
    return torch.arange(count, device=device, dtype=torch.float32)


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + positions(8, x.device)  # trial: kept-tensor
        if "scale" not in SCALES:
            SCALES["scale"] = torch.ones(8, device=x.device)
        return x * SCALES["scale"]  # trial: kept-tensor


class Mended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(8, dtype=torch.float32), persistent=False)
        self.scale = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.ones(8, device=x.device, dtype=x.dtype)
        return (x + self.positions.to(x.dtype)) * self.scale
