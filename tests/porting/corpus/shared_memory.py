"""A copy or a view, depending on strides, that is written to."""

import torch
import torch.nn.functional as F


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(x, x, x)
        flat = attended.transpose(0, 1).flatten(1)
        flat.add_(1)
        return attended * 2  # trial: shared-memory


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(x, x, x)
        flat = attended.transpose(0, 1).flatten(1).clone()
        flat.add_(1)
        return attended * 2
