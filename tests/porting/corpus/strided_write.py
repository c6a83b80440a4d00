"""Every second element written."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[..., 0::2] = -x[..., 1::2]  # trap: strided-write
        out[..., 1::2] = x[..., 0::2]  # trap: strided-write
        out[..., ::2].mul_(2)  # trap: strided-write
        out[:, slice(0, None, 2)] = 1  # trap: strided-write
        odd = out[..., 1::2]
        odd += 1  # trap: strided-write
        odd.mul_(2)  # trap: strided-write
        odd[:, 0] = 0  # trap: strided-write
        return out


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.stack((-x[..., 1::2] * 2, x[..., 0::2]), dim=-1).flatten(-2)
        out[:, 1:] = out[:, 1:] * 2
        out[:, slice(0, 2)] = 1
        odd = out[..., 1::2]
        odd = odd + 1
        out += odd.sum()
        return out
