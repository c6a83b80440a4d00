"""Standard input, output and error of a command, which the caller may have closed, or whose reader may be gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Names and modes of the streams, by descriptor."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Opens closed streams on the null device.

    Otherwise the next opened file would get the descriptor of a closed stream, and libraries would write warnings into
    it; and Python, which has None for a closed stream, would print errors to standard output. The descriptors stay open
    afterwards: libraries may have started threads that use them.
    """
    before = {name: getattr(sys, name) for name, _ in _STREAMS}
    for number, (name, mode) in enumerate(_STREAMS):
        _open_descriptor(number)
        if before[name] is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    try:
        with _print_undecodable_names(sys.stdout):
            yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


@contextlib.contextmanager
def library_output_discarded() -> Iterator[None]:
    """Sends to the null device what libraries write to descriptor 1, such as gloo's line for every connection.

    What Python prints goes where it went.
    """
    before = sys.stdout
    before.flush()
    kept = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = open(kept, "w", encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)


def write_error(text: str) -> None:
    """Writes a line to standard error; ignores a reader that is gone: a lost warning must not end a run."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def is_output_broken() -> bool:
    """Whether standard output cannot be written; if so, its buffer is discarded.

    Writes an empty line to find out: without a buffer (PYTHONUNBUFFERED) an earlier failure leaves no trace.
    """
    try:
        print(flush=True)
    except OSError:
        discard(sys.stdout)
        return True
    return False


def discard(stream: TextIO) -> None:
    """Redirects a stream and its buffer to the null device: Python would fail again when it flushes them at exit."""
    with contextlib.suppress(OSError):  # a stream that has no descriptor, as in tests
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def _open_descriptor(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        # The lowest free number, which is this one: those below it are open.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


@contextlib.contextmanager
def _print_undecodable_names(stream: TextIO) -> Iterator[None]:
    """Prints file names that are not UTF-8 as their bytes."""
    if not isinstance(stream, io.TextIOWrapper) or stream.errors != "strict":
        yield
        return
    stream.reconfigure(errors="surrogateescape")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # it is flushed by this, and may be gone
            stream.reconfigure(errors="strict")
