"""Files of the program store: whole or not there, checked when read, the least recently used removed first."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.compiler.cache import LIMIT_VARIABLE
from comfy_tpu.json_input import parse_json

logger = logging.getLogger(__name__)

SUFFIX = ".entry"
_MAGIC = b"comfy-tpu program store 1\n"
_PARTIAL = ".partial-"
FOLDER = "programs"
"""The folder of our entries inside the compile cache."""
_JAX_NAME = re.compile(r".+-[0-9a-f]{64}-cache")
_OWN_NAME = re.compile(rf".+-[0-9a-f]{{40}}{re.escape(SUFFIX)}|{re.escape(_PARTIAL)}[0-9a-f]{{16}}")
_ABANDONED_SECONDS = 3600


@dataclasses.dataclass(frozen=True)
class EntryInfo:
    """One file of the compile cache."""

    path: Path
    nbytes: int
    used: float
    """Seconds since the epoch: when it was last read or written."""


class Entries:
    """JSON documents in a directory by their keys. `writable`: whether reading may mark and remove files."""

    def __init__(self, directory: Path, *, writable: bool = True) -> None:
        self.directory = directory
        self._writable = writable

    def read(self, key: str) -> Mapping[str, Any] | None:
        """The entry of a key; None if there is none, or a damaged one, which is removed."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        try:
            entry = _unpack(content)
        except ValueError as error:
            logger.warning("compile cache: %s is damaged (%s); making it again", path.name, error)
            self.remove(key)
            return None
        if self._writable:
            touch(path)
        return entry

    def write(self, key: str, entry: Mapping[str, Any]) -> None:
        """Puts an entry in place. Two processes may do so at once; a failure is logged, and leaves nothing."""
        partial: Path | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            partial = self.directory / f"{_PARTIAL}{secrets.token_hex(8)}"
            partial.write_bytes(_pack(entry))  # as readable as JAX's own entries: a cache may have several users
            partial.replace(self.path(key))
        except OSError as error:
            logger.warning("compile cache %s cannot be written (%s)", self.directory, error.strerror or error)
            if partial is not None:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        """Removes an entry, if that is possible."""
        if self._writable:
            with contextlib.suppress(OSError):
                self.path(key).unlink(missing_ok=True)

    def all(self) -> Iterator[tuple[EntryInfo, Mapping[str, Any]]]:
        """All entries that can be read. To list them is no use of them: their times stay."""
        for info in list_files(self.directory.parent):
            if info.path.suffix == SUFFIX:
                with contextlib.suppress(OSError, ValueError):
                    yield info, _unpack(_read_keeping_times(info.path))

    def path(self, key: str) -> Path:
        """The file of an entry, which need not be there."""
        return self.directory / f"{key}{SUFFIX}"


def touch(path: Path) -> None:
    """Marks a file as used now: file systems are often mounted without times of access. When it was written stays."""
    with contextlib.suppress(OSError):
        os.utime(path, (time.time(), path.stat().st_mtime))


def _read_keeping_times(path: Path) -> bytes:
    before = path.stat()
    content = path.read_bytes()
    with contextlib.suppress(OSError):  # the file of another user
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return content


def _pack(entry: Mapping[str, Any]) -> bytes:
    content = json.dumps(entry, sort_keys=True).encode()
    return _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _unpack(written: bytes) -> Mapping[str, Any]:
    magic, checksum, content = written[: len(_MAGIC)], written[len(_MAGIC) :][:64], written[len(_MAGIC) + 65 :]
    if magic != _MAGIC:
        raise ValueError("it is of another kind")
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        raise ValueError("its content is not what was written")
    entry = parse_json(content)
    if not isinstance(entry, dict):
        raise ValueError("it holds no object")
    return entry


def is_cache_name(name: object) -> bool:
    """Whether a name is that of a file of JAX's own, in the same directory."""
    return isinstance(name, str) and Path(name).name == name and _JAX_NAME.fullmatch(name) is not None


def list_files(directory: Path) -> list[EntryInfo]:
    """The files of a compile cache, ours and JAX's, the least recently used first. Files of others are left alone."""
    found = []
    for place, names in ((directory, _JAX_NAME), (directory / FOLDER, _OWN_NAME)):
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    info = EntryInfo(Path(entry.path), status.st_size, max(status.st_mtime, status.st_atime))
                    found.append(info)
    return sorted(found, key=lambda info: info.used)


def trim_files(directory: Path, limit: int) -> int:
    """Removes the least recently used files until the cache is within its limit; returns the bytes that are left.

    A file that is larger than the limit goes first, with a warning: all others would go before it, and it in the end.
    """
    files = list_files(directory)
    total = sum(info.nbytes for info in files)
    now = time.time()
    too_large = [info for info in files if info.nbytes > limit and not _is_partial(info)]
    if too_large and limit:  # 0: nothing is to be kept
        _warn_of_size(max(too_large, key=lambda info: info.nbytes), limit)
    for info in [*too_large, *(info for info in files if info.nbytes <= limit or _is_partial(info))]:
        is_partial = _is_partial(info)
        if total <= limit and not is_partial:
            continue
        if is_partial and now - info.used < _ABANDONED_SECONDS:
            continue  # another process is writing it
        if remove_file(info.path):
            total -= info.nbytes
    return total


def _is_partial(info: EntryInfo) -> bool:
    return info.path.name.startswith(_PARTIAL)


def _warn_of_size(info: EntryInfo, limit: int) -> None:
    logger.warning(
        "compile cache: %s takes %s, and all may take %s together: it is not kept, and its program is compiled again "
        "in every process; set %s to more",
        info.path.name,
        format_bytes(info.nbytes),
        format_bytes(limit),
        LIMIT_VARIABLE,
    )


def remove_file(path: Path) -> bool:
    """Removes a file of the cache; False if that is not possible."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("compile cache: %s cannot be removed (%s)", path, error.strerror)
        return False
    return True


def format_bytes(nbytes: int) -> str:
    unit = max(power for power in range(4) if nbytes >= 1000**power or power == 0)
    return f"{nbytes / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"
