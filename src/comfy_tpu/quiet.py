"""Handles warnings while checking, tracing, loading and compiling, and restores the filters afterwards.

`warnings` has one state for all threads, so `catch_warnings` in two threads at once leaves it changed for ever. Here
the first thread that enters saves the state, and the last one that leaves restores it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_IGNORED = (
    # torch indexes with int64 everywhere; JAX narrows to int32 and says so at each one. Values are checked on entry.
    "Explicitly requested dtype.*int64",
    # diffusers works out positions in float64, which a TPU does not have. A family's tests see whether float32 does.
    "Explicitly requested dtype.*float64",
    # To donate is to say "may be taken over": a VAE's cache that grows after its first frame cannot be.
    "Some donated buffers were not usable",
    # From a configuration with a size of 0, which is refused in a sentence.
    "Initializing zero-element tensors is a no-op",
)

_LOGGERS = ("transformers.configuration_utils", "transformers.modeling_rope_utils")
"""They warn of keys of configurations, which are checked here."""

_lock = threading.Lock()
_depth = 0
_saved: tuple[list[Any], Any] | None = None
_handlers: dict[str, Callable[[re.Match[str]], None]] = {}


def on_warning(pattern: str, handler: Callable[[re.Match[str]], None]) -> None:
    """Within `quiet`, a warning that begins with `pattern` goes to `handler` instead of to the user."""
    _handlers[pattern] = handler


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    global _depth, _saved
    with _lock:
        if _depth == 0:
            _saved = (list(warnings.filters), warnings.showwarning)
            for pattern in _IGNORED:
                warnings.filterwarnings("ignore", message=pattern)
            for pattern in _handlers:
                warnings.filterwarnings("always", message=pattern)
            warnings.showwarning = _show
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_is_error)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _saved is not None:
                # A change by a function clears the record of warnings already shown, as catch_warnings does.
                warnings.simplefilter("default")
                warnings.filters[:], warnings.showwarning = _saved  # type: ignore[index]
                _saved = None
                for name in _LOGGERS:
                    logging.getLogger(name).removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _show(message: Warning | str, category: type[Warning], *details: Any, **more: Any) -> None:
    for pattern, handler in _handlers.items():
        if match := re.match(pattern, str(message)):
            handler(match)
            return
    if _saved is not None:
        _saved[1](message, category, *details, **more)
