"""LTX-2's prompts: the hidden states of all layers of Gemma 3, and connectors that make a text of them for the video
and one for the sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.shared.language_models import language_rules, strip_language_prefix
from comfy_tpu.parallel.rules import gather, replicate

_GLOBAL = "full_attention"
_LOCAL = "sliding_attention"


def _text_config(config: Config) -> dict[str, Any]:
    nested = config.get("text_config", config)
    if not isinstance(nested, Mapping):
        raise CheckpointError("the config.json of the text encoder has a text_config that is no object")
    return dict(nested)


def _build_text_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    model: Any = Gemma3TextModel(Gemma3TextConfig(**_text_config(config)))
    if set(model.config.layer_types) - {_GLOBAL, _LOCAL}:
        raise UnsupportedError(
            f"the text encoder has layers of {', '.join(sorted(set(model.config.layer_types)))}, expected {_GLOBAL} "
            f"and {_LOCAL}; use the text encoder of a published LTX-2"
        )
    for layer in model.layers:
        # `encode_text` refuses texts that are longer than the window: then all layers attend alike, and can be scanned.
        layer.self_attn.layer_type, layer.self_attn.is_sliding, layer.self_attn.sliding_window = _GLOBAL, False, None
    built: torch.nn.Module = model
    return built


TEXT_ENCODER = ComponentSpec(
    name="text_encoder",
    classes=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "Gemma3TextModel"),
    build=_build_text_encoder,
    unused=("lm_head.weight", "vision_tower.*", "multi_modal_projector.*"),
    stacks=(LayerStack("layers"),),
    shard_attention=False,  # 8 heads of keys; the products are divided all the same
    rules=(
        *language_rules("layers"),
        replicate("layers.*.self_attn.[qk]_norm.weight"),
        replicate("norm.weight"),
    ),
    rename=strip_language_prefix,
)


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    tokens = tokenizer(
        [prompt.strip() for prompt in prompts],
        padding="max_length",
        padding_side="left",
        max_length=length,
        truncation=True,
        add_special_tokens=True,
        return_tensors="pt",
    )
    return {name: tokens[name].int() for name in ("input_ids", "attention_mask")}


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """{"layers": [layers, batch, tokens, features]}: what goes into each layer, and comes out of the last one's norm.

    770 MB for two prompts of 1,024 tokens, which the connectors read where they are.
    """
    config, count = module.config, input_ids.shape[1]
    if config.sliding_window is not None and count > config.sliding_window:
        raise InvalidValueError(
            f"max_sequence_length={count} is more than the text encoder's sliding window of {config.sliding_window}; "
            f"use {config.sliding_window}",
            field="max_sequence_length",
        )
    hidden = module.embed_tokens(input_ids)
    places = torch.arange(count, device=hidden.device)
    # A token of the padding sees itself, so that no row is without keys.
    is_key = (attention_mask[:, None] > 0) | (places.unsqueeze(1) == places)
    visible = (is_key & (places.unsqueeze(1) >= places)).unsqueeze(1)
    tables = {kind: module.rotary_emb(hidden, places.unsqueeze(0), kind) for kind in sorted(set(config.layer_types))}
    is_global = torch.tensor([float(kind == _GLOBAL) for kind in config.layer_types], device=hidden.device)
    numbers = torch.arange(len(config.layer_types), device=hidden.device)

    def run(layer: Any, carry: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        before, number = carry
        if len(tables) == 1:
            (rotary,) = tables.values()
        else:
            here = torch.where(numbers == number, is_global, 0.0).sum() > 0
            rotary = tuple(torch.where(here, *pair) for pair in zip(tables[_GLOBAL], tables[_LOCAL], strict=True))
        after = layer(before, position_embeddings=rotary, attention_mask=visible)
        return (after, number + 1), before

    (hidden, _), layers = _fold(module.layers, run, (hidden, torch.zeros((), dtype=torch.int32, device=hidden.device)))
    return {"layers": torch.cat((layers, module.norm(hidden).unsqueeze(0)))}


def _fold(layers: Any, run: Callable[[Any, Any], tuple[Any, torch.Tensor]], carry: Any) -> tuple[Any, torch.Tensor]:
    """The last carry and all results, of stacked layers, and of plain ones, which a benchmark runs beside ours."""
    if not isinstance(layers, torch.nn.ModuleList):
        return layers.fold(run, carry)
    results = []
    for layer in layers:
        carry, result = run(layer, carry)
        results.append(result)
    return carry, torch.stack(results)


def _build_connectors(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    registers = [config.get(f"{kind}_connector_num_learnable_registers", 128) for kind in ("video", "audio")]
    if any(count != 128 for count in registers):
        raise UnsupportedError(
            f"the text connectors have {registers[0]} and {registers[1]} registers, and those of every LTX-2 that was "
            "published 128; use one of those"
        )
    return LTX2TextConnectors.from_config(dict(config))


CONNECTORS = ComponentSpec(
    name="connectors",
    classes=("LTX2TextConnectors",),
    build=_build_connectors,
    # 2.9 GB, half of which are one matrix; 6.3 GB in LTX-2.3. Gathered where they are used: two or eight layers a
    # stream, of 1,024 tokens.
    stacks=tuple(LayerStack(f"{stream}_connector.transformer_blocks") for stream in ("video", "audio")),
    rules=(gather("*.weight"), replicate("*.bias"), replicate("*.learnable_registers")),
    shard_attention=False,
)


def connect(
    module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, layers: torch.Tensor
) -> dict[str, torch.Tensor]:
    """{"text": [batch, tokens, features]} for the video, and "audio_text" for the sound. Learned registers take the
    place of padding: all tokens are read."""
    text, audio_text, _ = module(layers.permute(1, 2, 3, 0), attention_mask)
    return {"text": text, "audio_text": audio_text}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    length, features = settings.max_sequence_length, config.get("caption_channels", 3840)
    if config.get("use_prompt_embeddings", True):
        return {"text": (length, features), "audio_text": (length, features)}
    # The connectors have projected the prompt to the widths of both streams.
    widths = (config.get("cross_attention_dim", 4096), config.get("audio_cross_attention_dim", 2048))
    return {"text": (length, widths[0]), "audio_text": (length, widths[1])}


ENCODERS = (
    TextEncoder(TEXT_ENCODER, encode_text, tokenize=tokenize),
    TextEncoder(CONNECTORS, connect, tokenize=tokenize, takes=("layers",)),
)
