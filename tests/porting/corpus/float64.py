"""float64 on the device."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()  # trap: float64
        frequencies = torch.arange(8, dtype=torch.float64, device=x.device)  # trap: float64
        return (wide.to(torch.float64) + frequencies).to(x.dtype)  # trap: float64


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(8, dtype=torch.float64).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(8, dtype=torch.float64).cos().to(torch.float32)
        return x + (self.frequencies + table).to(x.dtype)
