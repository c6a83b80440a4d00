"""Tables that are made once for all calls."""

import functools

import torch

SCALES, POSITIONS = {}, []


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not POSITIONS:
            POSITIONS.append(torch.arange(8, device=x.device, dtype=torch.float32))
        x = x + POSITIONS[0]  # trial: kept-tensor
        if "scale" not in SCALES:
            SCALES["scale"] = torch.ones(8, device=x.device)
        return x * SCALES["scale"]  # trial: kept-tensor


@functools.lru_cache
def positions(count, device):
    """Emptied after a trace, being in the model's file."""
    return torch.arange(count, device=device, dtype=torch.float32)


class Table:
    """What it keeps is taken off after a trace: no module, but of the model's file too."""

    def __init__(self):
        self.made = {}

    def ones(self, like):
        if "ones" not in self.made:
            self.made["ones"] = torch.ones(8, device=like.device, dtype=like.dtype)
        return self.made["ones"]


class Mended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(8, dtype=torch.float32), persistent=False)
        self.scale = None
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.ones(8, device=x.device, dtype=x.dtype)
        x = (x + self.positions.to(x.dtype)) * self.scale + self.table.ones(x)
        return x + positions(8, x.device).to(x.dtype)
