"""Temporary files beside their place, named .comfy-tpu-HOST-PID-TOKEN.partial, and those that killed runs left.

The process that writes one holds a lock on it (flock), which the kernel releases when the process ends. A partial file
with this machine's name that can be locked is therefore abandoned, and the next run that writes into the directory
removes it. Files of other machines are kept: not every network file system shares locks between machines. Where files
cannot be locked, nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


_own: set[Path] = set()
"""Partial files that this process has open."""
_ENTRIES_LARGE = 1000
_PAUSE_PER_ENTRY = 0.0005
"""Seconds between two looks for abandoned files in a large directory, times its entries: one of 10,000 takes 5 ms to
list, longer than a small file takes to be written."""
_DIRECTORIES_MAX = 1024
_look_at: dict[Path, float] = {}
"""When a directory is to be looked at again."""


@contextlib.contextmanager
def open_partial(directory: Path, *, is_directory: bool = False) -> Iterator[Path]:
    """Creates a partial file or directory in `directory`, locked until the block ends and removed if it raises.

    A block that succeeds moves or removes it itself.
    """
    partial, lock = _create_locked(directory, is_directory)
    _own.add(partial)
    try:
        yield partial
    except BaseException:
        _remove(partial)
        raise
    finally:
        _own.discard(partial)
        os.close(lock)


def remove_own() -> None:
    """Removes the partial files of this process, which is about to end without leaving its blocks."""
    for partial in tuple(_own):
        _remove(partial)


def remove_abandoned(directory: Path) -> None:
    """Removes partial files of this machine in `directory` whose process is gone. Never raises an OSError.

    Returns at once where a large directory was looked at a moment ago.
    """
    if time.monotonic() < _look_at.get(directory, 0.0):
        return
    count = _remove_abandoned(directory)
    if count >= _ENTRIES_LARGE:
        if len(_look_at) >= _DIRECTORIES_MAX:
            _look_at.clear()
        _look_at[directory] = time.monotonic() + count * _PAUSE_PER_ENTRY


def _remove_abandoned(directory: Path) -> int:
    """The number of entries of the directory."""
    prefix = _prefix()
    name = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}\.partial")
    with contextlib.suppress(OSError):
        # There may be many thousand entries: no path of each, and no pattern.
        entries = os.listdir(directory)  # noqa: PTH208
        for path in [directory / entry for entry in entries if entry.startswith(prefix) and name.fullmatch(entry)]:
            lock = _open(path)
            if lock is None:
                continue
            try:
                if _acquire(lock):
                    _remove(path)
            finally:
                os.close(lock)
        return len(entries)
    return 0


def _prefix() -> str:
    return f".comfy-tpu-{re.sub(r'[^A-Za-z0-9._-]', '_', os.uname().nodename)[:64]}-"


def _create_locked(directory: Path, is_directory: bool) -> tuple[Path, int]:
    while True:  # until no other run takes it for an abandoned one before it is locked
        # Not made of the target's name, which may be as long as names can be.
        partial = directory / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}.partial"
        if is_directory:
            partial.mkdir()
            try:
                lock = os.open(partial, os.O_RDONLY | _FLAGS)
            except FileNotFoundError:
                continue
            except OSError:
                _remove(partial)
                raise
        else:
            lock = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | _FLAGS, 0o666)
        if _acquire(lock) is not False and _is_open_as(partial, lock):
            return partial, lock
        os.close(lock)


def _open(path: Path) -> int | None:
    """Opens a partial file; None if it is gone, or belongs to another user."""
    with contextlib.suppress(OSError):
        # To be locked on NFS a file must be open for writing. A directory cannot be.
        return os.open(path, _FLAGS | (os.O_RDONLY if path.is_dir() else os.O_RDWR))
    return None


def _acquire(lock: int) -> bool | None:
    """Whether this process got the lock; None where files cannot be locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_open_as(path: Path, lock: int) -> bool:
    """Whether `path` still names the file that the descriptor `lock` has open."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(lock))
    return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
