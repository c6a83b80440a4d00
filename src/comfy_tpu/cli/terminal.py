"""How the commands write lines: nothing that a file or an argument says reaches a terminal as a control character."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from comfy_tpu.cli.streams import discard, write_error
from comfy_tpu.terminal_text import escape_controls, sanitize


def message_line(text: str) -> str:
    """A message of the command. Further lines are indented: none in a quoted text can pass for one of ours."""
    return f"comfy-tpu: {sanitize(text)}".replace("\n", "\n  ")


def print_error(text: str) -> None:
    write_error(message_line(text))


def say(text: str) -> None:
    """A line on stderr that does not disturb progress bars."""
    if "tqdm" not in sys.modules:
        print_error(text)
        return
    try:
        sys.modules["tqdm"].tqdm.write(message_line(text), file=sys.stderr)
    except OSError:  # nobody reads it, and a lost line must not end a run
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
        say(self._rename(record.getMessage(), getattr(record, "field", None)))


def print_text(text: str) -> None:
    """A report, on stdout."""
    encoding = sys.stdout.encoding or "ascii"
    print(escape_controls(text).encode(encoding, "replace").decode(encoding), flush=True)


def print_paths(paths: Iterable[Path | str]) -> None:
    """One a line: escaped on a terminal, elsewhere exactly what the file system has, for the program that reads it."""
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
