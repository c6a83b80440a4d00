"""Text and image as one sequence, for both generations of Flux."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import current_trace, rotate_pairs
from comfy_tpu.config import MeshSizes


class JointProcessor:
    """diffusers' processor for Flux, with RoPE tables of half the width, and with `concat_streams`."""

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
        text, image = split_streams(out, encoder_hidden_states.shape[1])
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


def _mesh_sizes() -> MeshSizes:
    placement = current_trace().placement
    return MeshSizes() if placement is None else placement.sizes


def tp_size() -> int:
    """The size of the mesh's tp axis in the current trace."""
    return _mesh_sizes().tp


def concat_streams(text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """[batch, text and image tokens, …]. If sp divides both lengths, each device concatenates its own shards.

    Attention does not depend on the order of tokens with RoPE, so nothing needs to be moved between devices.
    """
    shards = _shard_count(text.shape[1], image.shape[1])
    return torch.cat([x.unflatten(1, (shards, -1)) for x in (text, image)], dim=2).flatten(1, 2)


def split_streams(joint: torch.Tensor, text_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `concat_streams`: (text, image)."""
    image_tokens = joint.shape[1] - text_tokens
    shards = _shard_count(text_tokens, image_tokens)
    parts = joint.unflatten(1, (shards, -1)).split((text_tokens // shards, image_tokens // shards), dim=2)
    text, image = (part.flatten(1, 2) for part in parts)
    return text, image


def _shard_count(*lengths: int) -> int:
    return _mesh_sizes().sp if all(length % _mesh_sizes().sp == 0 for length in lengths) else 1
