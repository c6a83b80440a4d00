"""LTX-Video's text encoder: T5, with a mask of the padding."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.shared.text_encoders import encode_t5, t5_component


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """T5 reads the padding too, as in diffusers; the transformer does not."""
    return {"text": encode_t5(module, input_ids), "text_mask": attention_mask.unsqueeze(-1).float()}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    length = settings.max_sequence_length
    return {"text": (length, config["caption_channels"]), "text_mask": (length, 1)}


ENCODER = TextEncoder(t5_component("text_encoder"), encode_text)
