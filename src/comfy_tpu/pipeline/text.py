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
    cut = tuple(_beyond(tokenizer, prompt, max_length) for prompt in cleaned)
    return Tokens(encoded.input_ids.int(), encoded.attention_mask.int(), cut)


def _beyond(tokenizer: Any, prompt: str, max_length: int) -> str:
    """What of the prompt the tokens do not reach, in its own words: decoded tokens would show unknown ones as such."""
    room = max_length - tokenizer.num_special_tokens_to_add()
    # verbose=False: transformers warns of "indexing errors" to come, which cutting prevents.
    every = tokenizer(
        prompt, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, truncation=False, verbose=False
    )
    if len(every["input_ids"]) <= room:
        return ""
    if tokenizer.is_fast:
        return prompt[every["offset_mapping"][room][0] :].strip()
    return str(tokenizer.decode(every["input_ids"][room:])).strip()
