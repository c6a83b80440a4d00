"""Replaces ComfyUI's attention functions by torch's SDPA, which our operators turn into kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from comfy_tpu.comfy.native.text_padding import PaddedTexts
from comfy_tpu.errors import UnsupportedError

HINTS = frozenset({"transformer_options", "small_input", "low_precision_attention", "_inside_attn_wrapper"})
"""Arguments of a model's attention calls that do not change the result."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The value of `transformer_options["optimized_attention_override"]`."""

    texts: PaddedTexts | None = None

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
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Attention on [batch, length, heads * dim], or on [batch, heads, length, dim] with `skip_reshape`."""
        if unknown := set(others) - HINTS:
            raise UnsupportedError(f"the model's attention is given {', '.join(sorted(unknown))}, which is not known")
        if not skip_reshape:
            batch, _, width = q.shape
            dim = width // heads
            key_heads = k.shape[-1] // dim if enable_gqa else heads
            # Some models have split the heads of one of the three already.
            q = q.reshape(batch, -1, heads, dim).transpose(1, 2)
            k, v = (x.reshape(batch, -1, key_heads, dim).transpose(1, 2) for x in (k, v))
        if mask is not None and mask.ndim == 2:
            mask = mask.unsqueeze(0)
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        if self.texts is not None and mask is None:
            joint = self.texts.joint_text(q.shape[2], k.shape[2]) if scale is None and not enable_gqa else None
            if joint is not None:
                return _attend_jointly((q, k, v), *joint, self.texts.behind, skip_output_reshape)
            mask = self.texts.real_key_mask(k.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def _attend_jointly(
    tensors: tuple[torch.Tensor, ...], text_tokens: int, lengths: torch.Tensor, behind: bool, keep_heads: bool
) -> torch.Tensor:
    """Attention over an image and its padded text as one sequence, of which the first `lengths` tokens are real if the
    text is last, so that no mask has to be sorted in every layer (4 ms of Qwen-Image's step on an H200)."""
    from comfy_tpu.bridge import joint_attention

    split = tensors[0].shape[2] - text_tokens if behind else text_tokens
    head: Any = tuple(tensor[:, :, :split] for tensor in tensors)
    tail: Any = tuple(tensor[:, :, split:] for tensor in tensors)
    image, text = joint_attention(*((head, tail) if behind else (tail, head)), lengths)
    results = [image, text] if behind else [text, image]
    # The model takes the two apart again: joined last, they are never written as one.
    return torch.cat(results, 2) if keep_heads else torch.cat([part.transpose(1, 2).flatten(2) for part in results], 1)


def pixel_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention of a VAE's attention block: one head over all pixels, [batch, channels, …] in and out."""
    queries, keys, values = (x.flatten(2).transpose(1, 2).unsqueeze(1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
    return out.squeeze(1).transpose(1, 2).reshape(q.shape)
