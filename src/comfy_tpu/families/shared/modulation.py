"""The linear layers of adaptive norms, as several families split them over the mesh."""

from __future__ import annotations

import torch

from comfy_tpu.bridge import constrain


class Modulation(torch.nn.Linear):
    """The linear layer of an adaptive norm, with a gathered result: one row per sample, which costs almost nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return constrain(super().forward(x), "dp", *(None,) * (x.ndim - 1))
