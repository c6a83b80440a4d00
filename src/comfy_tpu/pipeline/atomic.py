"""Atomic writes: files are written beside their place and moved into it at the end, so that none is ever incomplete.

A link is kept, and the file that it points to is replaced. A device, a named pipe or a socket is refused, and so is a
link to one, or into a directory that does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline.partial_files import open_partial, remove_abandoned

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME_MAX, _PATH_MAX = 255, 4095
"""Bytes, of Linux and of every file system in common use."""
_PARTIAL_NAME_MAX = 100

_KINDS = {
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
"""Names of the kinds of entries that are neither a file nor a link."""


def check_place(path: Path, *, field: str = "output", new_directories: int = 1) -> None:
    """Raises InvalidValueError unless a file can be written at `path`, whose last `new_directories` may be missing.

    `field`: the parameter that the path was given as, for the error.
    """
    check_name(path, field=field)
    if path.is_dir():
        raise InvalidValueError(f"{field}={path} is a directory, expected a file; add a file name", field=field)
    target = _find_target(path, field)
    directory = place = target.parent if path.is_symlink() else path.parent
    for _ in range(new_directories):
        place = place if place.exists() else place.parent
    if not place.exists():
        raise InvalidValueError(
            f"{field}={path} is in {directory}, and there is no {place}; create it first", field=field
        )
    if not place.is_dir():
        raise InvalidValueError(f"{field}={path} is inside {place}, which is a file; choose another place", field=field)
    try:
        with tempfile.TemporaryFile(dir=place):  # permission bits do not tell: think of root, read-only mounts, quotas
            pass
    except OSError as error:
        raise InvalidValueError(
            f"{field}={path} cannot be written: {place}: {error.strerror}; choose another place", field=field
        ) from error


def check_directory(path: Path, *, field: str) -> None:
    """Files can be put into the directory `path`, which may be missing itself; the one above it must be there."""
    check_name(path / "x", field=field)
    _check_links(path, path, field)
    if path.exists() and not path.is_dir():
        raise InvalidValueError(f"{field}={path} is a file, expected a directory; choose another name", field=field)
    place = path if path.exists() else path.parent
    if not place.is_dir():
        raise InvalidValueError(f"{field}={path} is in {place}, and there is no such directory; create it", field=field)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InvalidValueError(
            f"{field}={path} cannot be written: {place}: {error.strerror}; choose another place", field=field
        ) from error


def check_sequence(directory: Path, names: re.Pattern[str], *, field: str = "output") -> None:
    """Raises InvalidValueError unless all entries of `directory` with such names can be replaced."""
    for entry in _list_entries(directory, names):
        kind = _KINDS.get(stat.S_IFMT(entry.lstat().st_mode))
        if kind is not None:
            raise InvalidValueError(
                f"{field}={directory} has {kind} where a frame would go, {entry.name}; move it away, or choose another "
                "place",
                field=field,
            )


def find_half_character(name: str) -> str:
    """The first character that no name of a file can have: half of a pair (U+D800 to U+DFFF), but for those that stand
    for bytes which are not UTF-8. Empty: there is none."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        return name[error.start]
    return ""


def check_name(path: Path, *, field: str = "output") -> None:
    """Raises InvalidValueError for a name that no file system can hold, before other code uses the path and fails."""
    if "\0" in str(path):
        raise InvalidValueError(f"{field}={str(path)!r} holds a null character; choose another name", field=field)
    if half := find_half_character(str(path)):
        raise InvalidValueError(
            f"{field}={str(path)!r} holds {half!r}, which is half a character; choose another name", field=field
        )
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    # Beside it, a partial file with a name of its own is written first.
    length = len(os.fsencode(path.absolute().parent)) + 1 + max(len(os.fsencode(path.name)), _PARTIAL_NAME_MAX)
    if longest > _NAME_MAX or length > _PATH_MAX:
        raise InvalidValueError(
            f"{field}={str(path)[:60]}… is too long: {longest} bytes in one part, {length} in all, and a file system "
            f"takes {_NAME_MAX} and {_PATH_MAX}; choose a shorter name",
            field=field,
        )


@contextlib.contextmanager
def replacing(path: Path, *, field: str = "output", follows_links: bool = True) -> Iterator[Path]:
    """Yields a temporary sibling of `path` to write to. It replaces `path` when the block ends, and is removed if the
    block raises. `follows_links`: where `path` is a link, the file that it points to is replaced; False: the link."""
    target = _find_target(path, field) if follows_links else path
    with _partial(target.parent, path, field) as partial:
        yield partial
        with write_errors(path, field=field):
            partial.replace(target)


@contextlib.contextmanager
def replacing_sequence(directory: Path, names: re.Pattern[str]) -> Iterator[Path]:
    """`replacing` for many files: yields a temporary directory, whose files replace all entries of `directory` with
    such names when the block ends.

    The first file describes the sequence, so it must never be found beside files of another one: the old first file is
    removed before all others, and the new one is moved after all others. A run that is killed in between leaves none.
    """
    _check_links(directory, directory, "output")
    directory = Path(os.path.realpath(directory))
    with _partial(directory, directory, "output", is_directory=True) as partial:
        new, old = partial / "new", partial / "old"
        with write_errors(directory):
            new.mkdir()
            old.mkdir()
        yield new
        check_sequence(directory, names)
        with write_errors(directory):
            leaving = [(path, old / path.name) for path in sorted(_list_entries(directory, names))]
            coming = [(path, directory / path.name) for path in sorted(new.iterdir(), reverse=True)]
            _move_all([*leaving, *coming])
        shutil.rmtree(partial, ignore_errors=True)  # the new files are in their places, and stay


@contextlib.contextmanager
def write_errors(path: Path, *, field: str = "output") -> Iterator[None]:
    """Turns an OSError of writing `path` into ComfyTpuError. For blocks that only write: other code may raise
    OSError."""
    try:
        yield
    except OSError as error:
        remedy = "free some space or choose another place" if error.errno in _DISK_FULL else "choose another place"
        raise ComfyTpuError(
            f"{field}={path} could not be written: {error.strerror or error}; nothing of it was kept; {remedy}",
            field=field,
        ) from error


@contextlib.contextmanager
def _partial(directory: Path, path: Path, field: str, *, is_directory: bool = False) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        with write_errors(path, field=field):
            stack.enter_context(_make_directories(directory))
            remove_abandoned(directory)
            partial = stack.enter_context(open_partial(directory, is_directory=is_directory))
        yield partial


@contextlib.contextmanager
def _make_directories(directory: Path) -> Iterator[None]:
    """Makes the missing directories; if the block raises, they are removed again."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in missing:
            with contextlib.suppress(OSError):  # another process may have put a file there meanwhile
                place.rmdir()
        raise


def _find_target(path: Path, field: str) -> Path:
    """The file that `path` points to, links followed; it need not exist."""
    target = Path(os.path.realpath(path))
    _check_links(path.parent, path, field)
    if path.is_symlink() and target.is_symlink():
        raise InvalidValueError(f"{field}={path} is a link in a circle of links; remove it", field=field)
    if path.is_symlink() and not target.parent.is_dir():
        raise InvalidValueError(
            f"{field}={path} is a link to {target}, and there is no directory {target.parent}; create it, or remove "
            "the link",
            field=field,
        )
    try:
        found = path.stat()
    except OSError:  # nothing is there, or nothing can be: making the file will say why
        return target
    kind = _KINDS.get(stat.S_IFMT(found.st_mode))
    if kind is not None:
        link = f"a link to {target}, " if path.is_symlink() else ""
        raise InvalidValueError(f"{field}={path} is {link}{kind}, expected a file; choose another name", field=field)
    for number, stream in ((1, "output"), (2, "error")):
        with contextlib.suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(number)):
                raise InvalidValueError(
                    f"{field}={path} is the file that standard {stream} goes to; choose another name", field=field
                )
    return target


def _check_links(directory: Path, path: Path, field: str) -> None:
    """Raises InvalidValueError for a dangling link in the path: directories are never made behind a link."""
    for place in (directory, *directory.parents):
        if place.is_symlink() and not place.exists():
            raise InvalidValueError(
                f"{field}={path} goes through {place}, a link to {os.path.realpath(place)}, and there is no such "
                "directory; create it, or remove the link",
                field=field,
            )


def _list_entries(directory: Path, names: re.Pattern[str]) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if names.fullmatch(path.name)]


def _move_all(moves: list[tuple[Path, Path]]) -> None:
    """Moves the files in this order; if one move fails, all are moved back."""
    begun: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            begun.append((source, target))  # before it is moved: a signal may come in between
            source.replace(target)
    except BaseException:
        for source, target in reversed(begun):
            if os.path.lexists(target):
                target.replace(source)
        raise
