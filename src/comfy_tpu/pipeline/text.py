"""From a prompt to token ids, and what the text encoder made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from comfy_tpu.pipeline.model_files import ModelFiles


@dataclasses.dataclass(frozen=True)
class PromptEmbeddings:
    prompt: str
    positive: torch.Tensor
    """[1, tokens, features]; rows beyond the prompt's own tokens are zeros."""
    negative: torch.Tensor | None
    """None without guidance."""
    cut: str = ""
    """What of the prompt did not fit."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cut: tuple[str, ...]


def tokenize(files: ModelFiles, prompts: list[str], max_length: int) -> Tokens:
    tokenizer: Any = files.tokenizer
    cleaned = [files.family.clean_prompt(prompt) for prompt in prompts]
    encoded = tokenizer(
        cleaned,
        padding="max_length",
        max_length=max_length,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    cut = []
    for prompt in cleaned:
        every = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        room = max_length - tokenizer.num_special_tokens_to_add()
        cut.append(tokenizer.decode(every[room:]).strip() if len(every) > room else "")
    return Tokens(encoded.input_ids.int(), encoded.attention_mask.int(), tuple(cut))
