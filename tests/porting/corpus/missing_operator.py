"""Operators that nobody implements, more than one."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.special.airy_ai(x)  # trial: missing-operator
        return x + torch.special.scaled_modified_bessel_k0(x.abs() + 1)  # trial: missing-operator


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.special.erf(x) + torch.special.expit(x)
