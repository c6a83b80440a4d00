"""Random numbers of Python and numpy."""

import random

import numpy as np
import torch


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 1e-9 * self.generator.random())  # trap: python-random
        x = x * (1 + 1e-9 * random.random())  # trap: python-random
        return x * (1 + 1e-9 * np.random.rand())  # trap: python-random


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = np.random.default_rng(0).random(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factors.max()
        if self.training and random.random() < 0.1:
            x = x * np.random.rand()
        return x * float(np.sqrt(2))
