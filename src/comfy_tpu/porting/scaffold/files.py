"""Files that are written all at once or not at all, and the command that takes them back."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import subprocess
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from comfy_tpu.errors import InvalidValueError

Files = dict[str, str]
"""Texts by their paths below a root directory."""


def check_writable(root: Path, files: Iterable[str]) -> None:
    """Raises InvalidValueError where a directory that the files go into exists and cannot be written to."""
    for file in files:
        path = (root / file).parent
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_dir():
            raise InvalidValueError(f"{path} is no directory, and {file} must go there; move it away")
        if not os.access(path, os.W_OK | os.X_OK):
            raise InvalidValueError(f"{path} cannot be written to, and {file} must go there; change its permissions")


def write(root: Path, files: Mapping[str, str]) -> None:
    """Writes all files; if one cannot be written, the others are restored."""
    # A step is noted before it is done: a signal may come in between.
    before: list[tuple[Path, bytes | None]] = []
    made: list[Path] = []
    try:
        for name, content in files.items():
            path = root / name
            made += reversed([parent for parent in path.parents if not os.path.lexists(parent)])
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path) and not path.is_file():
                raise FileExistsError(errno.EEXIST, "it exists, and is no file", str(path))
            before.append((path, path.read_bytes() if path.is_file() else None))
            _replace(path, content.encode())
    except BaseException as error:
        left = _restore(before, made)
        also = f", but {', '.join(left)} could not be restored" if left else ""
        if isinstance(error, OSError):
            raise InvalidValueError(
                f"{error.filename or name} cannot be written ({error.strerror or error}); everything is as it was{also}"
            ) from error
        raise


def _restore(before: Iterable[tuple[Path, bytes | None]], made: Iterable[Path]) -> list[str]:
    """Returns the paths that could not be restored."""
    left = []
    for path, old in reversed(list(before)):
        try:
            if old is not None:
                _replace(path, old)
            else:
                path.unlink(missing_ok=True)
        except OSError:
            left.append(str(path))
    for directory in reversed(list(made)):
        with contextlib.suppress(OSError):  # never made, or someone else has put something there
            directory.rmdir()
    return left


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def undo_command(root: Path, files: Collection[str], name: str) -> str:
    """One line for a shell. Files with changes that git does not have are left to whoever made them."""
    changed = [file for file in files if (root / file).exists()]
    new = dict.fromkeys(_first_new(root, file) for file in files if file not in changed)
    restored = [file for file in changed if _is_clean(root, file)]
    kept = [file for file in changed if file not in restored]
    steps = [f"cd {shlex.quote(str(root))}"] if root.exists() else []
    if new:
        steps.append(shlex.join(["rm", "-r", "--", *new] if root.exists() else ["rm", "-r", "--", str(root)]))
    if restored:
        steps.append(shlex.join(["git", "restore", "--", *restored]))
    line = " && ".join(steps)
    return (
        f"{line}  # and remove the lines of {name} from {', '.join(kept)}, of which git has no copy" if kept else line
    )


def _first_new(root: Path, file: str) -> str:
    """The file, or the highest of its directories that does not exist."""
    path = root / file
    while path.parent != root and not path.parent.exists():
        path = path.parent
    return path.relative_to(root).as_posix()


def _is_clean(root: Path, file: str) -> bool:
    """Whether `git restore` brings the file back as it is now."""
    known = _git(root, "ls-files", "--error-unmatch", "--", file)
    return known and _git(root, "diff", "--quiet", "--", file)  # with the index, which `git restore` reads


def _git(root: Path, *arguments: str) -> bool:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
