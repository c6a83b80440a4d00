"""Masks of queries by keys."""

import torch
import torch.nn.functional as F


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()  # trap: square-mask
        mask = x[..., 0] > 0
        both = mask[:, None, :] * mask[:, :, None]  # trap: square-mask
        order = torch.arange(tokens, device=x.device)
        causal = causal & (order[None, :] <= order[:, None])  # trap: square-mask
        keys = x[..., 1] > -9
        both = both | (keys.unsqueeze(-1) & keys.unsqueeze(-2))  # trap: square-mask
        both = both & keys.unsqueeze(1).expand(-1, tokens, tokens)  # trap: square-mask
        visible = (causal | both).unsqueeze(1)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=visible)


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], x.shape[1], dtype=torch.bool, device=x.device)
        keys = mask[:, None, None, :]
        seen = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=keys)
        lengths = torch.full((x.shape[0],), 3, device=x.device)
        known = torch.arange(x.shape[1], device=x.device)[None, :] < lengths[:, None]
        angles = torch.arange(4, device=x.device)[:, None] * torch.arange(8, device=x.device)[None, :]
        seen = seen + known[:, None, :, None] + angles + (x[:, :, :, None] * x[:, :, None, :]).mean()
        return seen + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
