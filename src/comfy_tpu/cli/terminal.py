"""Prints lines for commands, without control characters that come from files or arguments."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from comfy_tpu.cli.streams import discard, write_error
from comfy_tpu.parallel.hosts import is_first_host
from comfy_tpu.terminal_text import escape_controls, sanitize


def message_line(text: str) -> str:
    """A message of the command. Further lines are indented, so that a quoted text cannot imitate a message."""
    return f"comfy-tpu: {sanitize(text)}".replace("\n", "\n  ")


def print_error(text: str) -> None:
    write_error(message_line(text))


def print_message(text: str) -> None:
    """Prints a line on stderr without disturbing progress bars; on several hosts, on the first."""
    if not is_first_host():
        return
    if "tqdm" not in sys.modules:
        print_error(text)
        return
    try:
        sys.modules["tqdm"].tqdm.write(message_line(text), file=sys.stderr)
    except OSError:  # the reader is gone; a lost line must not end a run
        discard(sys.stderr)


@contextlib.contextmanager
def warning_lines(rename: Callable[[str, str | None], str], *, verbose: bool = False) -> Iterator[None]:
    """Shows the package's warnings as lines of the command, each as `rename` returns it for the text and its field.

    If `verbose`, what it logs at INFO too.
    """
    logger, before = logging.getLogger("comfy_tpu"), logging.getLogger("comfy_tpu").level
    handler = _WarningLines(rename, logging.INFO if verbose else logging.WARNING)
    logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _WarningLines(logging.Handler):
    def __init__(self, rename: Callable[[str, str | None], str], level: int) -> None:
        super().__init__(level)
        self._rename = rename

    def emit(self, record: logging.LogRecord) -> None:
        print_message(self._rename(record.getMessage(), getattr(record, "field", None)))


def print_text(text: str) -> None:
    """Prints a report on stdout."""
    encoding = sys.stdout.encoding or "ascii"
    print(escape_controls(text).encode(encoding, "replace").decode(encoding), flush=True)


def print_paths(paths: Iterable[Path | str]) -> None:
    """Prints one path per line: escaped on a terminal, else with the file system's exact bytes, for other programs."""
    for path in map(str, paths):
        if sys.stdout.isatty():
            print_text(path.replace("\n", r"\n"))
            continue
        try:
            path.encode(sys.stdout.encoding or "ascii")
            print(path)
        except UnicodeEncodeError:  # a name that is not UTF-8, or a locale that is not
            sys.stdout.flush()
            sys.stdout.buffer.write(os.fsencode(path) + b"\n")
