"""The text encoders of HunyuanVideo-1.5: Qwen2.5-VL's language model, and ByT5 for words in quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.shared.language_models import count_layers, encode_causal, language_rules, truncate_layers
from comfy_tpu.parallel.rules import column, replicate, row
from comfy_tpu.quiet import quiet

SYSTEM_MESSAGE = (" " * 8).join(
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects: ",
        "1. The main content and theme of the video. ",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. ",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. ",
        "4. background environment, light, style and atmosphere. ",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
TEMPLATE_TOKENS = 108
"""Tokens of the template before the prompt, which are cut off after encoding."""
GLYPH_TOKENS = 256
_LAYERS_SKIPPED = 2
"""The hidden states are taken this many layers before the last."""


def _build_text_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    used = count_layers(config, _LAYERS_SKIPPED) - _LAYERS_SKIPPED
    model = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**truncate_layers(config, used)))
    model.norm = torch.nn.Identity()
    return model


def _build_glyph_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**config))


TEXT_ENCODER = ComponentSpec(
    name="text_encoder",
    classes=("Qwen2_5_VLTextModel",),
    build=_build_text_encoder,
    unused=("norm.weight", "layers.*"),  # of the layers, the last
    stacks=(LayerStack("layers"),),
    shard_attention=False,  # 28 heads, of which tp=8 takes no whole share; the products are divided all the same
    rules=language_rules("layers"),
)

GLYPH_ENCODER = ComponentSpec(
    name="text_encoder_2",
    classes=("T5EncoderModel",),
    build=_build_glyph_encoder,
    shard_attention=False,  # 6 heads
    # Not scanned: only T5's first block has a position bias, which the others are given. There are twelve.
    rules=(
        row("shared.weight"),
        column("encoder.block.*.SelfAttention.[qkv].weight"),
        row("encoder.block.*.SelfAttention.o.weight"),
        replicate("encoder.block.*.relative_attention_bias.weight"),  # (buckets, 6 heads)
        column("encoder.block.*.DenseReluDense.wi*.weight"),
        row("encoder.block.*.DenseReluDense.wo.weight"),
        replicate("encoder.block.*.layer_norm.weight"),
        replicate("encoder.final_layer_norm.weight"),
    ),
)


def tokenize_text(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    """Tokenizes the template with each prompt: `length` tokens for the prompt and the template's end."""
    with quiet():
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as diffusers_pipeline

    tokens = tokenizer.apply_chat_template(
        diffusers_pipeline.format_text_input(list(prompts), SYSTEM_MESSAGE),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        padding="max_length",
        max_length=length + TEMPLATE_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    mask = tokens["attention_mask"].int()
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise CheckpointError(
            "the tokenizer pads texts on the left, where HunyuanVideo-1.5 cuts off its template; set "
            'padding_side to "right" in its tokenizer_config.json'
        )
    return {"input_ids": tokens["input_ids"].int(), "attention_mask": mask}


def tokenize_glyphs(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    """Tokenizes the words in quotes; a prompt without quotes gets padding only."""
    with quiet():
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as diffusers_pipeline

    quoted = [diffusers_pipeline.extract_glyph_texts(prompt) for prompt in prompts]
    tokens = tokenizer(
        [text or "" for text in quoted],
        padding="max_length",
        max_length=length,
        truncation=True,
        add_special_tokens=True,
        return_tensors="pt",
    )
    present = torch.tensor([[text is not None] for text in quoted])
    return {"input_ids": tokens.input_ids.int(), "attention_mask": (tokens.attention_mask * present).int()}


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = encode_causal(module, module.embed_tokens(input_ids))
    return _mask_padding("text", hidden[:, TEMPLATE_TOKENS:], attention_mask[:, TEMPLATE_TOKENS:])


def encode_glyphs(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return _mask_padding("glyph", module(input_ids, attention_mask, return_dict=False)[0], attention_mask)


def _mask_padding(name: str, hidden: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The hidden states with zeros in place of the padding, and the mask [batch, tokens, 1]."""
    visible = mask.unsqueeze(-1).bool()
    return {name: torch.where(visible, hidden, 0.0), f"{name}_mask": visible.to(hidden.dtype)}


TEXT_ENCODERS = (
    TextEncoder(TEXT_ENCODER, encode_text, tokenize=tokenize_text),
    TextEncoder(GLYPH_ENCODER, encode_glyphs, tokenizer="tokenizer_2", tokenize=tokenize_glyphs, length=GLYPH_TOKENS),
)
