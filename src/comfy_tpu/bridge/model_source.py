"""Finding the line of a model's own source from inside the machinery that runs it."""

from __future__ import annotations

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


def _is_model_source(filename: str) -> bool:
    in_torchax = f"{os.sep}torchax{os.sep}" in filename
    in_standard_library = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    in_machinery = filename.startswith(_MACHINERY) or in_torchax or in_standard_library
    return Path(filename).exists() and not in_machinery


def calling_line() -> str:
    """` at file.py:12 in forward` for the innermost line of a model that is running now, else an empty string."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_model_source(frame.f_code.co_filename):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def raising_line(error: BaseException) -> str:
    """The same for the line of a model that an exception passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_model_source(frame.filename):
            return f" at {frame.filename}:{frame.lineno} in {frame.name}"
    return ""
