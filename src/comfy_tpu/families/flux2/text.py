"""The text encoders of Flux.2: hidden states of a language model at three depths, of Mistral for dev, Qwen3 for klein.

Both run on the devices. The transformer reads the padding too: diffusers' pipelines pass no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.shared.language_models import (
    build_qwen3,
    count_layers,
    language_rules,
    sliding_window_error,
    strip_language_prefix,
    tokenize_chat,
    truncate_layers,
)
from comfy_tpu.parallel.rules import replicate
from comfy_tpu.quiet import quiet

_DEPTHS = 3
"""The number of depths at which hidden states are taken, evenly spaced; the layers after the last are not loaded."""
KLEIN_LAYERS = 9
DEV_LAYERS = 10


def _build_qwen(config: Mapping[str, Any]) -> torch.nn.Module:
    return _split_layers(build_qwen3(_truncate_config(config, KLEIN_LAYERS)), KLEIN_LAYERS)


def _build_mistral(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import MistralConfig, MistralModel

    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("the config.json of the text encoder has no text_config; download the model again")
    if text.get("sliding_window"):
        raise sliding_window_error()
    # Only Mistral3's own configuration has None for its default, not Mistral's.
    shortened = {**_truncate_config(text, DEV_LAYERS), "sliding_window": None}
    return _split_layers(MistralModel(MistralConfig(**shortened)), DEV_LAYERS)


def _truncate_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    count_layers(config, _DEPTHS * layers)  # one more at least: the last layer's answer would be normed in diffusers
    return truncate_layers(config, _DEPTHS * layers)


def _split_layers(model: Any, layers: int) -> torch.nn.Module:
    """The model with its layers in three lists, each of which is scanned."""
    every = list(model.layers)
    starts = range(0, len(every), layers)
    model.parts = torch.nn.ModuleList(torch.nn.ModuleList(every[start : start + layers]) for start in starts)
    del model.layers
    model.norm = torch.nn.Identity()
    built: torch.nn.Module = model
    return built


def _make_rename(layers: int) -> Callable[[str], str]:
    def rename(name: str) -> str:
        name = strip_language_prefix(name)
        kind, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        if kind != "layers" or int(number) >= _DEPTHS * layers:
            return name
        return f"parts.{int(number) // layers}.{int(number) % layers}.{inner}"

    return rename


_STACKS = tuple(LayerStack(f"parts.{depth}") for depth in range(_DEPTHS))
_RULES = language_rules("parts")
_UNUSED = ("norm.weight", "lm_head.weight", "layers.*")

QWEN = ComponentSpec(
    name="text_encoder",
    classes=("Qwen3ForCausalLM",),
    build=_build_qwen,
    unused=_UNUSED,
    stacks=_STACKS,
    shard_attention=False,  # 512 tokens; the products are divided all the same
    rules=(*_RULES, replicate("parts.*.self_attn.[qk]_norm.weight")),
    rename=_make_rename(KLEIN_LAYERS),
)

MISTRAL = ComponentSpec(
    name="text_encoder",
    classes=("Mistral3ForConditionalGeneration",),
    build=_build_mistral,
    unused=(*_UNUSED, "vision_tower.*", "multi_modal_projector.*"),
    stacks=_STACKS,
    shard_attention=False,
    rules=_RULES,
    rename=_make_rename(DEV_LAYERS),
)


def tokenize_klein(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    return tokenize_chat(tokenizer, prompts, length, enable_thinking=False)


def tokenize_dev(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    with quiet():
        from diffusers.pipelines.flux2 import pipeline_flux2

    return _as_inputs(
        tokenizer.apply_chat_template(
            pipeline_flux2.format_input(list(prompts)),
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=length,
        )
    )


def _as_inputs(tokens: Any) -> dict[str, torch.Tensor]:
    return {name: tokens[name].int() for name in ("input_ids", "attention_mask")}


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """{"text": [batch, tokens, three times the features]}."""
    hidden = module.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    rotary = module.rotary_emb(hidden, positions.unsqueeze(0))
    before = positions.unsqueeze(1) >= positions
    # No token attends to the padding, not even the padding itself, whose hidden states are used nevertheless.
    visible = before & attention_mask.bool()[:, None, None, :]
    found = []
    for part in module.parts:
        for layer in part:
            hidden = layer(hidden, attention_mask=visible, position_embeddings=rotary)
        found.append(hidden)
    return {"text": torch.stack(found, dim=2).flatten(2)}


KLEIN_TEXT = TextEncoder(QWEN, encode_text, tokenize=tokenize_klein)
DEV_TEXT = TextEncoder(MISTRAL, encode_text, tokenize=tokenize_dev)
