"""torch.cuda started, in the constructor and in the forward."""

import torch


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1, device="cuda")  # trap: cuda
        self.device_index = torch.cuda.current_device()  # trap: cuda

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()  # trap: cuda
        return x.cuda() * self.scale  # trap: cuda


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)
        self.device_index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if x.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return x.to("cpu") * self.scale.to(x.device, x.dtype)
