"""Files that are there whole or not at all: written beside their place, and moved into it at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from comfy_tpu.errors import ComfyTpuError, InvalidValueError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_place(path: Path, *, field: str = "output") -> None:
    """A file can be put at `path`. Its directory may be missing if that one's parent is there.

    `field` is what the path was given as, for the error.
    """
    if path.is_dir():
        raise InvalidValueError(f"{field}={path} is a directory, expected a file; add a file name")
    directory = path.parent
    place = directory if directory.exists() else directory.parent
    if not place.exists():
        raise InvalidValueError(f"{field}={path} is in {directory}, and there is no {place}; create it first")
    if not place.is_dir():
        raise InvalidValueError(f"{field}={path} is inside {place}, which is a file; choose another place")
    try:
        with tempfile.TemporaryFile(dir=place):  # permission bits do not tell: think of root, read-only mounts, quotas
            pass
    except OSError as error:
        raise InvalidValueError(
            f"{field}={path} cannot be written: {place}: {error.strerror}; choose another place"
        ) from error


@contextlib.contextmanager
def replacing(path: Path, *, field: str = "output") -> Iterator[Path]:
    """Gives a temporary sibling to write. It takes `path` when the block ends, and is gone if the block raises."""
    target = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    with _sibling(target, field) as partial:
        yield partial
        with explained(path, field=field):
            partial.replace(target)


@contextlib.contextmanager
def replacing_files(directory: Path) -> Iterator[Path]:
    """The same for many files: a temporary directory, whose files go to `directory` when the block ends."""
    directory = Path(os.path.realpath(directory))
    with _sibling(directory / "files") as partial:
        with explained(directory):
            partial.mkdir()
        yield partial
        with explained(directory):
            # The first file last: whoever finds it takes the rest for complete.
            for file in sorted(partial.iterdir(), reverse=True):
                file.replace(directory / file.name)
            partial.rmdir()


@contextlib.contextmanager
def explained(path: Path, *, field: str = "output") -> Iterator[None]:
    """Around writing only: what else a run does may fail with an OSError of its own."""
    try:
        yield
    except OSError as error:
        remedy = "free some space or choose another place" if error.errno in _FULL else "choose another place"
        raise ComfyTpuError(
            f"{field}={path} could not be written: {error.strerror or error}; nothing of it was kept; {remedy}"
        ) from error


@contextlib.contextmanager
def _sibling(target: Path, field: str = "output") -> Iterator[Path]:
    with explained(target, field=field):
        made = _make_directories(target.parent)
    # Not made of the target's name, which may be as long as names can be.
    partial = target.with_name(f".comfy-tpu-{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        for directory in made:
            with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                directory.rmdir()
        raise


def _make_directories(directory: Path) -> list[Path]:
    """Those that were missing, innermost first."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing
