"""A tensor made without a device, then written."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape)
        out[:, 0] = x[:, 0]  # trap: host-tensor-written
        total = torch.zeros(8)
        total += x.sum((0, 1))  # trap: host-tensor-written
        held = torch.empty(2, 4, 8)
        held.copy_(x)  # trap: host-tensor-written
        doubled = torch.empty(2, 4, 8)
        torch.mul(x, 2, out=doubled)  # trap: host-tensor-written
        return out + total + held + doubled


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, device=x.device, dtype=x.dtype)
        out[:, 0] = x[:, 0]
        total = torch.zeros_like(x[0, 0])
        total += x.sum((0, 1))
        torch.mul(x[0, 0], 2, out=total)
        positions = torch.arange(8)
        positions[0] = 3
        return out + total + positions + torch.tensor([1.0], dtype=x.dtype) + x.new_zeros(8)
