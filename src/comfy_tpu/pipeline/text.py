"""Tokens of prompts."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from comfy_tpu.errors import CheckpointError, config_errors
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.plain_tokenizer import PlainTokenizer


@dataclasses.dataclass(frozen=True)
class Tokens:
    inputs: dict[str, torch.Tensor]
    """Inputs of the text encoder, by name."""
    length: int
    """Tokens of each prompt, with its padding."""
    cut: tuple[str, ...]
    """The end of each prompt that exceeded the token limit."""


_tokenizing = threading.Lock()
"""A tokenizer keeps the padding and the limit of a call until the next: those of another thread would be taken."""


def tokenize(
    files: ModelFiles,
    encoder: TextEncoder,
    prompts: Sequence[str],
    max_length: int,
    images: Sequence[Image.Image] = (),
) -> Tokens:
    """Any thread may call it. `images`: those that the encoder sees, if it sees any."""
    with _tokenizing, config_errors(f"the {encoder.tokenizer} of model={files.name}"):
        tokenizer: Any = files.tokenizer(encoder.tokenizer, may_be_plain=encoder.tokenize is None)
        tokens = _tokenize(tokenizer, files, encoder, prompts, max_length, images)
    _check_ids(tokens.inputs["input_ids"], files, encoder)
    return tokens


def vocabulary_size(config: Config) -> Any:
    """The rows of the embedding table, as a text encoder's configuration names them; None if it does not.

    Where a configuration has a part for text, the table is that part's: the copy outside it may have another value.
    """
    text = config.get("text_config")
    inner = text.get("vocab_size") if isinstance(text, Mapping) else None
    return inner or config.get("vocab_size")


def _check_ids(ids: torch.Tensor, files: ModelFiles, encoder: TextEncoder) -> None:
    """Raises CheckpointError for ids beyond the embedding table: a device would silently read its last row."""
    rows = vocabulary_size(files.config(encoder.component))
    if isinstance(rows, int) and ids.numel() and int(ids.max()) >= rows:
        raise CheckpointError(
            f"the {encoder.tokenizer} of model={files.name} gives token {int(ids.max())}, and its "
            f"{encoder.component.name} knows {rows}: they do not belong together; download the model again"
        )


def _tokenize(
    tokenizer: Any,
    files: ModelFiles,
    encoder: TextEncoder,
    prompts: Sequence[str],
    max_length: int,
    images: Sequence[Image.Image],
) -> Tokens:
    cleaned = [files.family.text.clean_prompt(prompt) for prompt in prompts]
    length = encoder.length or max_length
    pixels: dict[str, torch.Tensor] = {}
    if encoder.read_images is not None:
        pixels = encoder.read_images(files.image_processor(encoder.image_processor), images)
    if encoder.tokenize is not None:
        inputs = encoder.tokenize(tokenizer, cleaned, length, **pixels)
        limits = _token_limits(inputs, encoder.tokenize(tokenizer, [""], length, **pixels))
    elif isinstance(tokenizer, PlainTokenizer):
        inputs = tokenizer.encode_rows(cleaned, length)
        limits = [length - tokenizer.num_special_tokens_to_add()] * len(cleaned)
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
        limits = [length - tokenizer.num_special_tokens_to_add()] * len(cleaned)
    # An encoder that always reads the same few tokens stands beside one that reads the rest.
    cut = ("" if encoder.length else _find_cut_text(tokenizer, *pair) for pair in zip(cleaned, limits, strict=True))
    return Tokens(inputs | pixels, inputs["input_ids"].shape[1], tuple(cut))


def _token_limits(inputs: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]) -> list[int]:
    """The number of a prompt's own tokens that fit behind its template.

    The template's tokens are those that a prompt has in common with an empty one. Its end may be cut off.
    """
    (before,) = _visible_tokens(empty)
    width = inputs["input_ids"].shape[1]
    return [width - _common_prefix_length(before, row) for row in _visible_tokens(inputs)]


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two lists of tokens."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _visible_tokens(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Tokens by row without padding, which may be on either side."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in pairs]


def _find_cut_text(tokenizer: Any, prompt: str, limit: int) -> str:
    """The end of a prompt beyond `limit` tokens, in its own words: decoded tokens would not show unknown words."""
    # verbose=False: transformers warns of "indexing errors" to come, which cutting prevents.
    every = tokenizer(
        prompt, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, truncation=False, verbose=False
    )
    if len(every["input_ids"]) <= limit:
        return ""
    if tokenizer.is_fast:
        return prompt[every["offset_mapping"][limit][0] :].strip()
    return str(tokenizer.decode(every["input_ids"][limit:])).strip()
