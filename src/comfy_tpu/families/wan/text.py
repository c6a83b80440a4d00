"""Wan's text encoder: UMT5, with zeros in place of the padding."""

from __future__ import annotations

import html
import re
from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.text_encoders import encode_umt5, umt5_component, zero_padding

TEXT_ENCODER = umt5_component("text_encoder")


def clean_prompt(text: str) -> str:
    """Cleans a prompt like diffusers' Wan pipeline, so that its tokens are the same."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    return zero_padding(encode_umt5(module, input_ids, attention_mask), attention_mask)


def encode_prompt(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"text": encode_text(module, input_ids, attention_mask)}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, config["text_dim"])}
