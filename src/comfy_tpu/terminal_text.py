"""Messages that are safe to print: prompts, key names and paths in them come from files that anybody may have made."""

from __future__ import annotations

import logging
import re

LINE_CHARACTERS = 2000
"""The longest line that is printed whole; a longer one loses its middle."""
_HEAD, _TAIL = 1200, 600
_EXCERPT_CHARACTERS = 200

# C0 but the newline, DEL, C1: what moves the cursor, colours, renames the window. Then line separators, the characters
# that reorder text around them (U+202A to U+202E, U+2066 to U+2069), and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""`text` with control characters as Python writes them, `\x1b`; newlines and all other characters stay."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def excerpt(text: str) -> str:
    """The beginning of a text that may be long, and its length."""
    if len(text) <= _EXCERPT_CHARACTERS:
        return text
    return f"{text[:_EXCERPT_CHARACTERS]}… ({len(text):,} characters)"


def sanitize(message: str) -> str:
    """`message` without control characters, and without the middle of very long lines.

    The end of a message is kept, because it tells what to do.
    """
    return "\n".join(_shorten(line) for line in escape_controls(message).split("\n"))


def _shorten(line: str) -> str:
    if len(line) <= LINE_CHARACTERS:
        return line
    return f"{line[:_HEAD]} … ({len(line) - _HEAD - _TAIL:,} characters left out) … {line[-_TAIL:]}"


class SanitizeRecords(logging.Handler):
    """A handler that prints nothing: on a logger, it sanitizes records before handlers of its ancestors print them."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = sanitize(record.getMessage()), None
