"""A large weight with a name of its own."""

import torch


class Trapped(torch.nn.Module):  # trial: no-sharding-rule
    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.mixture = torch.nn.Linear(8, width)
        self.back = torch.nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.mixture(x))


class Mended(torch.nn.Module):
    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"fc1": torch.nn.Linear(8, width), "fc2": torch.nn.Linear(width, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp["fc2"](self.mlp["fc1"](x))
