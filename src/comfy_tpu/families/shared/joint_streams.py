"""Text and image as one sequence, as both generations of Flux have it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import current_trace
from comfy_tpu.config import MeshSizes
from comfy_tpu.families.shared.rope import rotate_pairs


class JointProcessor:
    """diffusers' processor for Flux, with RoPE tables of half the width and streams joined by `concat_streams`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (attn.heads, -1))

        query = attn.norm_q(heads(attn.to_q(hidden_states)))
        key = attn.norm_k(heads(attn.to_k(hidden_states)))
        value = heads(attn.to_v(hidden_states))
        if encoder_hidden_states is not None:
            query = concat_streams(attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))), query)
            key = concat_streams(attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))), key)
            value = concat_streams(heads(attn.add_v_proj(encoder_hidden_states)), value)
        if image_rotary_emb is not None:
            query, key = rotate_pairs(query, *image_rotary_emb), rotate_pairs(key, *image_rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        out = out.transpose(1, 2).flatten(2, 3).type_as(hidden_states)
        if encoder_hidden_states is None:
            return out
        text, picture = split_streams(out, encoder_hidden_states.shape[1])
        return attn.to_out[1](attn.to_out[0](picture)), attn.to_add_out(text)


def _mesh() -> MeshSizes:
    placement = current_trace().placement
    return MeshSizes() if placement is None else placement.sizes


def tp() -> int:
    """Ways in which the mesh splits features."""
    return _mesh().tp


def concat_streams(text: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    """[batch, text and image tokens, …]. Where sp divides both, each device puts its own parts together.

    Attention does not mind the order of tokens that bring their positions along, and so nothing moves.
    """
    shards = _shards(text.shape[1], picture.shape[1])
    return torch.cat([x.unflatten(1, (shards, -1)) for x in (text, picture)], dim=2).flatten(1, 2)


def split_streams(both: torch.Tensor, text_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `concat_streams` was made of."""
    picture_tokens = both.shape[1] - text_tokens
    shards = _shards(text_tokens, picture_tokens)
    parts = both.unflatten(1, (shards, -1)).split((text_tokens // shards, picture_tokens // shards), dim=2)
    text, picture = (part.flatten(1, 2) for part in parts)
    return text, picture


def _shards(*lengths: int) -> int:
    return _mesh().sp if all(length % _mesh().sp == 0 for length in lengths) else 1
