"""ComfyUI's attention as torch's: the one call that our operators turn into kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from comfy_tpu.comfy.native.texts import FilledTexts


@dataclasses.dataclass(frozen=True)
class Attention:
    """For `transformer_options["optimized_attention_override"]`."""

    texts: FilledTexts | None = None

    def __call__(
        self,
        original: Callable[..., Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """[batch, length, heads * dim], unless it was reshaped before."""
        if not skip_reshape:
            batch, _length, width = q.shape
            # Some models have split the heads of one of the three already.
            q, k, v = (x.reshape(batch, -1, heads, width // heads).transpose(1, 2) for x in (q, k, v))
        if mask is not None and mask.ndim == 2:
            mask = mask.unsqueeze(0)
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        if self.texts is not None and mask is None:
            mask = self.texts.is_real(k.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def picture_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What a VAE's attention block calls: one head over every pixel, [batch, channels, …] in and out."""
    queries, keys, values = (x.flatten(2).transpose(1, 2).unsqueeze(1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
    return out.squeeze(1).transpose(1, 2).reshape(q.shape)
