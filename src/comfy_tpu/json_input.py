"""Parses untrusted JSON: every file, header and comment is parsed here, with the same limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""The most levels of lists and objects, so that other code may recurse. A model's configuration has four."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError where `text` is not JSON, is nested too deeply, or holds half a character."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _SURROGATE.search(text):
        _check_characters(value)
    return value


def read_json(path: Path) -> Any:
    """The value in a file. Raises OSError, or ValueError as `parse_json` does."""
    if path.exists() and not path.is_file():  # opening a named pipe would wait for a writer
        raise OSError(f"{path} is not a file")
    return parse_json(path.read_bytes())


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, (dict, list))]
        if not containers:
            return
        level = [child for each in containers for child in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start]!r}, which is half a character") from None
