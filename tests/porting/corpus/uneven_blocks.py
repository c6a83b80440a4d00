"""A list of blocks in which one is different."""

import torch


class Block(torch.nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(8, inner)
        self.fc2 = torch.nn.Linear(inner, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.fc1(x))


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(4 if i == 2 else 8) for i in range(4)])  # trial: uneven-blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(8) for _ in range(4)])
        # A pyramid and a chain, where a scan was never meant.
        self.stages = torch.nn.ModuleList([Block(2**i) for i in range(4)])
        chain = [torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Tanh(), torch.nn.Dropout()]
        self.chain = torch.nn.ModuleList(chain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.stages, *self.chain):
            x = block(x)
        return x
