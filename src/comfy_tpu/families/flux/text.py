"""Flux.1's text encoders: CLIP for one pooled row, T5 for the tokens."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.shared.text_encoders import clip_component, encode_t5, pooled_clip, t5_component


def encode_pooled(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pooled": pooled_clip(module, input_ids)}


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"text": encode_t5(module, input_ids)}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {
        "pooled": (config["pooled_projection_dim"],),
        "text": (settings.max_sequence_length, config["joint_attention_dim"]),
    }


ENCODERS = (
    TextEncoder(clip_component("text_encoder"), encode_pooled, length=77),
    TextEncoder(t5_component("text_encoder_2"), encode_text, tokenizer="tokenizer_2"),
)
