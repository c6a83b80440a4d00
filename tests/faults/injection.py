"""Fails the n-th write, read, rename, fsync, allocation, compilation or transfer of this process.

Calls of the operating system are counted by a preloaded library (points.c), below the directories that are watched, and
those of torch, numpy and jax by functions around them. `build` makes the library; a process has it from its start on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SYSTEM_KINDS = ("create", "open", "read", "map", "write", "rename", "fsync")
"""In the order of points.c."""
PYTHON_KINDS = ("allocation", "compile", "transfer")

FAULTS: tuple[tuple[str, int, bool], ...] = (
    ("create", errno.ENOSPC, True),
    ("create", errno.EIO, False),
    ("open", errno.EIO, False),
    ("open", errno.EMFILE, True),
    ("read", errno.EIO, False),
    ("map", errno.ENOMEM, False),
    ("write", errno.ENOSPC, True),
    ("write", errno.EIO, False),
    ("rename", errno.EIO, False),
    ("fsync", errno.EIO, False),
)
"""Kind, error, and whether all later calls of the kind fail too."""

_SOURCE = Path(__file__).with_name("points.c")


def build(directory: Path) -> Path:
    library = directory / "points.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, _SOURCE, "-ldl"], check=True)
    return library


class SystemPoints:
    """The calls of the operating system, in a process with the preloaded library."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.faults_count.restype = ctypes.c_long
        self._library.faults_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._observer: Any = None

    def watch(self, directory: Path) -> None:
        self._library.faults_watch(os.fsencode(os.path.realpath(directory)))

    @contextlib.contextmanager
    def failing(self, kind: str, number: int, error: int, sticky: bool) -> Iterator[None]:
        self._library.faults_arm(SYSTEM_KINDS.index(kind), number, error, sticky)
        try:
            yield
        finally:
            self._library.faults_arm(-1, 0, 0, 0)

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        counts: dict[str, int] = {}
        self._library.faults_arm(-1, 0, 0, 0)
        yield counts
        counts |= {kind: self._library.faults_count(number) for number, kind in enumerate(SYSTEM_KINDS)}

    @contextlib.contextmanager
    def observing(self, observe: Callable[[str], None]) -> Iterator[None]:
        """Calls `observe` before each call that changes the disk."""
        changes = ("create", "write", "rename", "fsync")

        def call(number: int) -> None:
            if SYSTEM_KINDS[number] in changes:
                observe(SYSTEM_KINDS[number])

        self._observer = ctypes.CFUNCTYPE(None, ctypes.c_int)(call)
        self._library.faults_observe(self._observer)
        try:
            yield
        finally:
            self._library.faults_observe(None)


class PythonPoints:
    """Calls of torch, numpy and jax: allocations of comfy_tpu's own code, compilations, transfers either way."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(PYTHON_KINDS, 0)
        self._armed: tuple[str, int] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        import jax
        import numpy as np
        import torch

        from comfy_tpu.bridge import boundary

        places: list[tuple[Any, str, str]] = [
            *((torch, name, "allocation") for name in ("empty", "zeros", "full", "cat", "stack", "zeros_like")),
            *((np, name, "allocation") for name in ("empty", "zeros", "concatenate", "ascontiguousarray")),
            (jax.stages.Lowered, "compile", "compile"),
            (jax, "device_put", "transfer"),
            (boundary, "fetch_global", "transfer"),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        try:
            for owner, name, kind in places:
                setattr(owner, name, self._wrap(getattr(owner, name), kind))
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    @contextlib.contextmanager
    def failing(self, kind: str, number: int) -> Iterator[None]:
        self._counts = dict.fromkeys(PYTHON_KINDS, 0)
        self._armed = (kind, number)
        try:
            yield
        finally:
            self._armed = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        self._counts = counts = dict.fromkeys(PYTHON_KINDS, 0)
        yield counts

    def _wrap(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if kind != "allocation" or caller.startswith("comfy_tpu"):
                self._count(kind)
            return function(*args, **kwargs)

        return call

    def _count(self, kind: str) -> None:
        self._counts[kind] += 1
        if self._armed != (kind, self._counts[kind]):
            return
        if kind == "allocation":
            raise MemoryError("Unable to allocate 18.2 GiB")
        import jax

        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 19560341504 bytes."
        )
