"""From a prompt to token ids, and what the text encoder made of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.errors import CheckpointError, config_errors
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.pipeline.model_files import ModelFiles

Embeddings = Mapping[str, torch.Tensor]
"""By the names of `TextEncoding.embedding_shapes`, one row each."""


@dataclasses.dataclass(frozen=True)
class PromptEmbeddings:
    prompt: str
    positive: Embeddings
    negative: Embeddings | None
    """None without guidance."""
    cut: str = ""
    """What of the prompt did not fit."""
    shared: Embeddings = dataclasses.field(default_factory=dict)
    """What both read of the images that are given."""
    pictures: str = ""
    """The fingerprint of those."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    inputs: dict[str, torch.Tensor]
    """Of the text encoder, by name."""
    cut: tuple[str, ...]
    """Of each prompt, what did not fit."""


def tokenize(files: ModelFiles, encoder: TextEncoder, prompts: Sequence[str], max_length: int) -> Tokens:
    tokenizer: Any = files.tokenizer(encoder.tokenizer)
    with config_errors(f"the {encoder.tokenizer} of model={files.name}"):
        tokens = _tokenize(tokenizer, files, encoder, prompts, max_length)
    _check_ids(tokens.inputs["input_ids"], files, encoder)
    return tokens


def _check_ids(ids: torch.Tensor, files: ModelFiles, encoder: TextEncoder) -> None:
    """On a device a number beyond the table would get the last row, without a word."""
    config = files.config(encoder.component)
    text = config.get("text_config")
    rows = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    if isinstance(rows, int) and ids.numel() and int(ids.max()) >= rows:
        raise CheckpointError(
            f"the {encoder.tokenizer} of model={files.name} gives token {int(ids.max())}, and its "
            f"{encoder.component.name} knows {rows}: they do not belong together; download the model again"
        )


def _tokenize(
    tokenizer: Any, files: ModelFiles, encoder: TextEncoder, prompts: Sequence[str], max_length: int
) -> Tokens:
    cleaned = [files.family.text.clean_prompt(prompt) for prompt in prompts]
    length = encoder.length or max_length
    if encoder.tokenize is not None:
        inputs = encoder.tokenize(tokenizer, cleaned, length)
        rooms = _rooms(inputs, encoder.tokenize(tokenizer, [""], length))
    else:
        encoded = tokenizer(
            cleaned,
            padding="max_length",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        inputs = {"input_ids": encoded.input_ids.int(), "attention_mask": encoded.attention_mask.int()}
        rooms = [length - tokenizer.num_special_tokens_to_add()] * len(cleaned)
    # An encoder that always reads the same few tokens stands beside one that reads the rest.
    beyond = ("" if encoder.length else _beyond(tokenizer, *pair) for pair in zip(cleaned, rooms, strict=True))
    return Tokens(inputs, tuple(beyond))


def _rooms(inputs: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]) -> list[int]:
    """How many of its own tokens each prompt has room for behind what stands before every one: what it has in common
    with the empty one. Of a template's end nothing must be left."""
    (before,) = _visible(empty)
    width = inputs["input_ids"].shape[1]
    return [width - _common(before, row) for row in _visible(inputs)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _visible(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Tokens by row, without the filling, on whichever side that is."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in pairs]


def _beyond(tokenizer: Any, prompt: str, room: int) -> str:
    """What of the prompt the tokens do not reach, in its own words: decoded tokens would show unknown ones as such."""
    # verbose=False: transformers warns of "indexing errors" to come, which cutting prevents.
    every = tokenizer(
        prompt, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, truncation=False, verbose=False
    )
    if len(every["input_ids"]) <= room:
        return ""
    if tokenizer.is_fast:
        return prompt[every["offset_mapping"][room][0] :].strip()
    return str(tokenizer.decode(every["input_ids"][room:])).strip()
