"""A mask of queries by keys that only a run shows."""

import torch
import torch.nn.functional as F


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(16, 16).tril().bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.table[: x.shape[1], : x.shape[1]]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=near)  # trial: square-mask


class Mended(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(16, 16).tril().bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.table[-1:, : x.shape[1]]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=keys)
