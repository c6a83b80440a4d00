"""Finding the line of a model's own source from inside the machinery that runs it."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
import types
from pathlib import Path

import jax
import torch

import comfy_tpu

_MACHINERY = tuple(f"{Path(path).parent}{os.sep}" for path in (torch.__file__, jax.__file__, comfy_tpu.__file__))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


@functools.cache
def _is_model_source(filename: str) -> bool:
    in_torchax = f"{os.sep}torchax{os.sep}" in filename
    in_standard_library = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    in_machinery = filename.startswith(_MACHINERY) or in_torchax or in_standard_library
    return Path(filename).exists() and not in_machinery


def calling_place() -> tuple[str, int, str] | None:
    """File, line and function of the innermost line of a model that is running now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_model_source(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return None


def raising_place(error: BaseException) -> tuple[str, int, str] | None:
    """File, line and function of the innermost line of a model that an exception passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_model_source(frame.filename):
            return frame.filename, frame.lineno or 0, frame.name
    return None


def calling_line() -> str:
    """` at file.py:12 in forward` for the line of a model that is running now, else an empty string."""
    return _format_place(calling_place())


def raising_line(error: BaseException) -> str:
    """The same for the line of a model that an exception passed through."""
    return _format_place(raising_place(error))


def _format_place(place: tuple[str, int, str] | None) -> str:
    return "" if place is None else f" at {place[0]}:{place[1]} in {place[2]}"
