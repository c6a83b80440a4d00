"""Flash attention, imported where it is used."""

import torch
import torch.nn.functional as F


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from flash_attn import flash_attn_func  # trap: gpu-only-import

        return flash_attn_func(x[:, :, None], x[:, :, None], x[:, :, None])


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            flash_attn_func = None
        if flash_attn_func is not None and x.device.type == "cuda":
            return flash_attn_func(x[:, :, None], x[:, :, None], x[:, :, None])
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
