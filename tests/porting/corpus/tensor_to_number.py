"""Python numbers made of tensors."""

import numpy as np
import torch


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max().item()  # trap: tensor-to-number
        first = float(x[0, 0, 0])  # trap: tensor-to-number
        rows = x[:, : (x > 0).sum()]  # trap: tensor-to-number
        steps = torch.arange(x.argmax(), device=x.device)  # trap: tensor-to-number
        named = {f"{x.mean():.1f}": np.asarray(x)}  # trap: tensor-to-number
        first = first + len(named)
        first = first + x.new_zeros(x.argmax()).numel() + self.largest  # trap: tensor-to-number
        kinds = torch.nn.functional.one_hot(x.abs().long())  # trap: tensor-to-number
        first = first + kinds.shape[-1]
        return rows * scale + first + steps.sum() + sum(x.tolist()[0][0])  # trap: tensor-to-number

    @property
    def largest(self) -> float:
        return self.weight.max().item()  # trap: tensor-to-number


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    @property
    def count(self) -> int:
        return self.weight.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max()
        first = x[0, 0, 0]
        heads = torch.tensor([1.0, 2.0]).sum().item()
        rows = x[:, : x.shape[1] // int(heads)]
        named = {f"{x.mean()} {x.shape[0]:.1f}": np.asarray(heads)}
        kinds = torch.nn.functional.one_hot(x.abs().long().clamp(max=3), 4)
        first = first + x.new_zeros(x.shape[0]).numel() + self.count + kinds.shape[-1]
        return rows * scale + first + float(x.shape[0]) + len(named)
