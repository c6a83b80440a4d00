"""Language models that several families read prompts with: Qwen3, Qwen2.5-VL and Mistral."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.errors import CheckpointError, UnsupportedError
from comfy_tpu.parallel.rules import Rule, column, replicate, row


def language_rules(layers: str) -> tuple[Rule, ...]:
    """Sharding rules of the embedding table and of the decoder layers at this path. Heads may be fewer than tp: the
    products are divided, attention is not."""
    return (
        row("embed_tokens.weight"),
        column(f"{layers}.*.self_attn.[qkv]_proj.*"),
        row(f"{layers}.*.self_attn.o_proj.weight"),
        column(f"{layers}.*.mlp.gate_proj.weight"),
        column(f"{layers}.*.mlp.up_proj.weight"),
        row(f"{layers}.*.mlp.down_proj.weight"),
        replicate(f"{layers}.*layernorm.weight"),
    )


def strip_language_prefix(name: str) -> str:
    """The name of a weight without the modules around the language model, which versions of transformers nest
    differently."""
    while name.startswith(("model.", "language_model.")):
        name = name.partition(".")[2]
    return name


def count_layers(config: Mapping[str, Any], least: int) -> int:
    """The number of layers, `least` and one more at least; raises CheckpointError."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or isinstance(count, bool) or count <= least:
        raise CheckpointError(
            f"the config.json of the text encoder has num_hidden_layers={count!r}, expected a whole number over "
            f"{least}; download the model again"
        )
    return count


def truncate_layers(config: Mapping[str, Any], used: int) -> dict[str, Any]:
    """The configuration of the first layers, for hidden states that are taken before the last one."""
    shorter = {**copy.deepcopy(dict(config)), "num_hidden_layers": used}  # transformers writes into what it is given
    if config.get("layer_types"):
        shorter["layer_types"] = list(config["layer_types"])[:used]
    return shorter


def build_qwen3(config: Mapping[str, Any]) -> torch.nn.Module:
    """Qwen3's layers without the norm behind the last one: hidden states are taken before it."""
    from transformers import Qwen3Config, Qwen3Model

    if config.get("use_sliding_window"):
        raise sliding_window_error()
    model = Qwen3Model(Qwen3Config(**config))
    model.norm = torch.nn.Identity()
    return model


def sliding_window_error() -> UnsupportedError:
    return UnsupportedError(
        "the text encoder attends to a sliding window, which no model of this family was published with; use a model "
        "whose text encoder has sliding_window null"
    )


def encode_causal(module: Any, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Embedded tokens -> the answer of the layers in `module.layers`, [batch, tokens, features].

    The layers are called without the model's own forward, which makes a mask of tokens × tokens. Texts are padded on
    the right, and attention is causal: no token of a text attends to the padding. `positions`: [3, batch, tokens] of
    Qwen2.5-VL; None: 0, 1, 2 and so on.
    """
    if positions is None:
        positions = torch.arange(hidden.shape[1], device=hidden.device).view(1, 1, -1).expand(3, hidden.shape[0], -1)
        positions = positions if hasattr(module.rotary_emb, "mrope_section") else positions[0, :1]
    rotary = module.rotary_emb(hidden, positions)
    for layer in module.layers:
        hidden = layer(hidden, position_embeddings=rotary)
    return hidden


def tokenize_chat(
    tokenizer: Any, prompts: Sequence[str], length: int, *, enable_thinking: bool, padding_side: str | None = None
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of each prompt as a user's message, padded to `length`. `padding_side` None: that of
    the tokenizer."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )
        for prompt in prompts
    ]
    tokens = tokenizer(
        texts,
        padding="max_length",
        padding_side=padding_side or tokenizer.padding_side,
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )
    return {name: tokens[name].int() for name in ("input_ids", "attention_mask")}
