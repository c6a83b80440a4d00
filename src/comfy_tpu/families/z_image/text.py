"""Z-Image's text encoder: the hidden states of Qwen3 before its last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.shared.language_models import (
    build_qwen3,
    count_layers,
    encode_causal,
    language_rules,
    strip_language_prefix,
    tokenize_chat,
    truncate_layers,
)
from comfy_tpu.parallel.rules import replicate

_LAYERS_SKIPPED = 1
"""The hidden states are taken this many layers before the last, which is not loaded."""


def _build_text_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    used = count_layers(config, _LAYERS_SKIPPED) - _LAYERS_SKIPPED
    return build_qwen3(truncate_layers(config, used))


TEXT_ENCODER = ComponentSpec(
    name="text_encoder",
    classes=("Qwen3ForCausalLM", "Qwen3Model"),
    build=_build_text_encoder,
    unused=("norm.weight", "lm_head.weight", "layers.*"),  # of the layers, the last
    stacks=(LayerStack("layers"),),
    shard_attention=False,  # 512 tokens; the products are divided all the same
    rules=(*language_rules("layers"), replicate("layers.*.self_attn.[qk]_norm.weight")),
    rename=strip_language_prefix,
)


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    return tokenize_chat(tokenizer, prompts, length, enable_thinking=True, padding_side="right")


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """{"text": [batch, tokens, features]}, zeros behind the prompt: `transformer.prepare` counts the others."""
    hidden = encode_causal(module, module.embed_tokens(input_ids))
    return {"text": torch.where(attention_mask.unsqueeze(-1).bool(), hidden, 0.0)}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, config.get("cap_feat_dim", 2560))}


ENCODERS = (TextEncoder(TEXT_ENCODER, encode_text, tokenize=tokenize),)
