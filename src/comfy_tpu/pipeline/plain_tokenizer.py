"""Tokenizers that are a `tokenizer.json` and nothing else, read by the library of that format.

transformers, whose import takes 1.5 s, adds nothing to them. Classes that change what the file says stay with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.json_input import read_json

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_KNOWN_KEYS = {"backend", "tokenizer_class", "model_max_length", "pad_token", "eos_token", "unk_token", "bos_token"}


class PlainTokenizer:
    """As transformers' tokenizer of the same files, as far as prompts need it."""

    is_fast = True

    def __init__(self, path: Path, pad_token: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._pad_token = pad_token
        self._pad_id = self._tokenizer.token_to_id(pad_token)

    @classmethod
    def open(cls, folder: Path) -> PlainTokenizer | None:
        """The tokenizer of a folder; None if it may need transformers."""
        described, tokens = folder / "tokenizer_config.json", folder / "tokenizer.json"
        if not described.is_file() or not tokens.is_file():
            return None
        config = read_json(described)
        if not isinstance(config, dict) or config.get("tokenizer_class") not in _PLAIN_CLASSES:
            return None
        if set(config) - _KNOWN_KEYS or not isinstance(config.get("pad_token"), str):
            return None
        if not isinstance(config.get("model_max_length", 0), int):
            return None
        if (folder / "special_tokens_map.json").exists() or (folder / "added_tokens.json").exists():
            return None
        made = cls(tokens, config["pad_token"])
        return None if made._pad_id is None else made  # transformers adds such a token

    def num_special_tokens_to_add(self) -> int:
        count: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        return count

    def encode_rows(self, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Tokens of each prompt, cut and padded to `length`."""
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length, pad_id=self._pad_id, pad_token=self._pad_token)
        rows = self._tokenizer.encode_batch(list(prompts))
        return {
            "input_ids": torch.tensor([row.ids for row in rows], dtype=torch.int32),
            "attention_mask": torch.tensor([row.attention_mask for row in rows], dtype=torch.int32),
        }

    def __call__(self, prompt: str, **_: Any) -> dict[str, Any]:
        """All tokens of a prompt, without special ones, and the place of each in the text."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        found = self._tokenizer.encode(prompt, add_special_tokens=False)
        return {"input_ids": found.ids, "offset_mapping": found.offsets}
