"""Text encoders that several families read prompts with: CLIP, T5 and UMT5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.parallel.rules import column, replicate, row


def clip_component(name: str) -> ComponentSpec:
    return ComponentSpec(
        name=name,
        classes=("CLIPTextModel",),
        build=_build_clip,
        stacks=(LayerStack("encoder.layers"),),
        # CLIP-L: 0.25 GB, 77 tokens, and twelve heads that eight devices do not divide.
        rules=(replicate("embeddings.*"), replicate("encoder.layers.*"), replicate("final_layer_norm.*")),
        shard_attention=False,
        rename=_prefix_stripper("text_model."),
    )


def t5_component(name: str) -> ComponentSpec:
    return ComponentSpec(
        name=name,
        classes=("T5EncoderModel",),
        heads="num_heads",
        build=_build_t5,
        stacks=(LayerStack("encoder.block"),),
        rules=(
            row("shared.weight"),  # features over tp, as for UMT5
            row("position_bias.weight"),  # (buckets, heads)
            column("encoder.block.*.SelfAttention.[qkv].weight"),
            row("encoder.block.*.SelfAttention.o.weight"),
            column("encoder.block.*.DenseReluDense.wi*.weight"),
            row("encoder.block.*.DenseReluDense.wo.weight"),
            replicate("encoder.block.*.layer_norm.weight"),
            replicate("encoder.final_layer_norm.weight"),
        ),
        rename=lambda own: "position_bias.weight" if own == _POSITION_BIAS else own,
    )


def umt5_component(name: str) -> ComponentSpec:
    return ComponentSpec(
        name=name,
        classes=("UMT5EncoderModel",),
        heads="num_heads",
        build=_build_umt5,
        stacks=(LayerStack("encoder.block"),),
        rules=(
            row("shared.weight"),  # features over tp: a lookup then needs no gathering of the 256,384 rows
            column("encoder.block.*.SelfAttention.[qkv].weight"),
            row("encoder.block.*.SelfAttention.o.weight"),
            row("encoder.block.*.relative_attention_bias.weight"),  # (buckets, heads)
            column("encoder.block.*.DenseReluDense.wi*.weight"),
            row("encoder.block.*.DenseReluDense.wo.weight"),
            replicate("encoder.block.*.layer_norm.weight"),
            replicate("encoder.final_layer_norm.weight"),
        ),
    )


def pooled_clip(module: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """[batch, features] of the token that ends the prompt. Without a mask, as diffusers' pipelines call it."""
    result: torch.Tensor = module(input_ids).pooler_output
    return result


def encode_t5(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, tokens, features], padding included. Without a mask the padding is read like text, as some of diffusers'
    pipelines do."""
    hidden = module.shared(input_ids)
    attention = module.encoder.block[0].layer[0].SelfAttention
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    buckets = attention._relative_position_bucket(
        positions[None, :] - positions[:, None],
        bidirectional=True,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias = module.position_bias(buckets).permute(2, 0, 1).unsqueeze(0)
    if attention_mask is not None:
        hidden_from = torch.finfo(bias.dtype).min
        bias = bias + (1 - attention_mask[:, None, None].to(bias.dtype)) * hidden_from
    for block in module.encoder.block:
        hidden = block(hidden_states=hidden, position_bias=bias)[0]
    result: torch.Tensor = module.encoder.final_layer_norm(hidden)
    return result


def encode_umt5(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, tokens, features], padding included."""
    result: torch.Tensor = module(input_ids, attention_mask, return_dict=False)[0]
    return result


def zero_padding(embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The embeddings with zeros in place of the padding, which is what some models were trained on."""
    return embeddings * attention_mask.unsqueeze(-1).to(embeddings.dtype)


def _build_umt5(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**config))


def _build_clip(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    model: Any = CLIPTextModel(CLIPTextConfig(**config))
    # Older versions have all of it in a `text_model`, and so do the names in published checkpoints.
    inner: torch.nn.Module = getattr(model, "text_model", model)
    return inner


def _build_t5(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    model: Any = T5EncoderModel(T5Config(**config))
    # T5 has the table of its first block for all of them. Taken out of it the blocks are equal, and can be scanned.
    first = model.encoder.block[0].layer[0].SelfAttention
    model.position_bias = first.relative_attention_bias
    del first.relative_attention_bias
    first.has_relative_attention_bias = False
    return model


_POSITION_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _prefix_stripper(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)
