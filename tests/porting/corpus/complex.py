"""Rotation by complex numbers."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))  # trap: complex
        angles = x.float()[..., :4]
        turned = pairs * torch.polar(torch.ones_like(angles), angles)  # trap: complex
        turned = turned + angles.to(torch.complex64)  # trap: complex
        turned = turned * torch.exp(1j * angles)  # trap: complex
        return torch.view_as_real(turned).flatten(-2).type_as(x)


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = x[..., :4].cos(), x[..., :4].sin()
        return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)
