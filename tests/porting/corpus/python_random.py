"""Random numbers of Python and numpy."""

import random

import numpy as np
import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 1e-9 * random.random())  # trap: python-random
        return x * (1 + 1e-9 * np.random.rand())  # trap: python-random


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.1:
            x = x * np.random.rand()
        return x * float(np.sqrt(2))
