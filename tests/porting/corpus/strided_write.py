"""Every second element written."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[..., 0::2] = -x[..., 1::2]  # trap: strided-write
        out[..., 1::2] = x[..., 0::2]  # trap: strided-write
        out[..., ::2].mul_(2)  # trap: strided-write
        return out


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.stack((-x[..., 1::2] * 2, x[..., 0::2]), dim=-1).flatten(-2)
        out[:, 1:] = out[:, 1:] * 2
        return out
