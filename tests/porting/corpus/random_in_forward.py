"""Random numbers inside the model."""

import torch
import torch.nn.functional as F


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)
        self.start = torch.randn(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn_like(x)  # trap: random-in-forward
        x = x + torch.rand(8, device=x.device)  # trap: random-in-forward
        x = x + torch.nn.init.trunc_normal_(torch.empty(8))  # trap: random-in-forward
        x = F.dropout(x, 0.1, True)  # trap: random-in-forward
        return F.dropout(x, 0.5, training=True)  # trap: random-in-forward


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)
        self.start = torch.randn(3)

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            x = x + torch.randn_like(x)
        if noise is not None:
            x = x + noise
        x = F.dropout(x, 0.1, False) + torch.nn.init.constant_(torch.empty(8, dtype=x.dtype), 0.5)
        return self.dropout(F.dropout(x, 0.5, training=self.training))
