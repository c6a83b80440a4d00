"""The checkout that a family is written into: found, looked at, staged, and written to all at once or not at all."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import json
import keyword
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import comfy_tpu
from comfy_tpu.distribution import HOME_PAGE
from comfy_tpu.errors import InvalidValueError, UnsupportedError

_SHARED = ("src/comfy_tpu/families/registry.py", "src/comfy_tpu/comfy/node_families.py")
"""Where every family is a name among others."""
_MARKS = (
    *_SHARED,
    "pyproject.toml",
    "src/comfy_tpu/families/ported.py",
    "tests/comfy_pack/stand_in.py",
    "tests/families/ported.py",
)
MARK = "Written by `comfy-tpu port new`"
"""In the first lines of a family's files."""
_STAGED = ("src", "tests", "tools", "__init__.py", "pyproject.toml")
_OWN = {
    *("TRANSFORMER", "VAE", "SCHEDULER", "SCHEDULERS", "PUBLISHED"),
    *("SAME", "CHOSEN", "OWN", "CHANGES"),
}
"""Names in the family's own file, and in its test."""
_LONGEST = 40
"""Letters of a NAME: file systems take 255 bytes, and longer words are put around it."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A symbolic link to write."""

    to: str


Files = dict[str, str | bytes | Link]
"""By their paths from the checkout's root."""


def find_checkout(into: str | None) -> Path:
    places = [Path(into)] if into else [Path(comfy_tpu.__file__).parents[2], Path.cwd()]
    for place in places:
        if all((place / mark).is_file() for mark in _MARKS):
            return place.resolve()
    raise InvalidValueError(
        f"{into or 'here'} is no checkout of comfy-tpu, and a family is written into one (its nodes, pages and tests "
        f"are files there); git clone {HOME_PAGE} and `pip install -e .[dev]` in it, or give its directory with --into"
    )


def check_name(name: str, checkout: Path) -> None:
    """A name is a file's, and in capitals a constant's beside those of the other families."""
    usable = name.isidentifier() and name == name.lower() and name.isascii() and not keyword.iskeyword(name)
    if not usable or name.startswith("_"):
        raise InvalidValueError(
            f"NAME={name!r} is no name for a module; use small letters, digits and _ such as pixart_sigma"
        )
    if len(name) > _LONGEST:
        raise InvalidValueError(f"NAME={name[:_LONGEST]}… has {len(name)} letters; use {_LONGEST} at most")
    for file in (f"src/comfy_tpu/families/{name}.py", f"tests/families/test_{name}.py"):
        if (checkout / file).exists():
            raise InvalidValueError(
                f"NAME={name} is taken: {file} is there, and nothing is overwritten; choose another name"
                f"{_earlier(name, checkout / file)}"
            )
    if name.upper() in _OWN:
        raise InvalidValueError(
            f"NAME={name} cannot be used: {name.upper()} is something else in every family's file or test; choose "
            "another name"
        )
    for file in _SHARED:
        if name.upper() in _names_in(checkout / file):
            raise InvalidValueError(
                f"NAME={name} is taken: {name.upper()} is a name in {file}, and nothing is overwritten; choose another "
                "name"
            )


def _earlier(name: str, file: Path) -> str:
    """For whoever ran the same command before, and did not see it end."""
    if not file.is_file() or MARK not in file.read_text(encoding="utf-8", errors="replace"):
        return ""
    return (
        f", or go on with it: an earlier `port new {name}` wrote it (`git status` shows all that it wrote), and python "
        f"-m pytest tests/families/test_{name}.py tests it"
    )


def _names_in(path: Path) -> set[str]:
    """Whatever a module calls by a name: its imports, and what it assigns and defines."""
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise InvalidValueError(f"{path} is no Python ({error}); mend it first, new lines go there") from None
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
    return found


def tool(name: str) -> Path:
    for place in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (place / name).exists():
            return place / name
    found = shutil.which(name)
    if found is None:
        raise UnsupportedError(
            f"{name} is not here, which brings what is written into shape; pip install -e .[dev]", field=name
        )
    return Path(found)


def formatted(root: Path, names: Iterable[str]) -> dict[str, str]:
    """The staged files without unused imports, with sorted ones, and formatted.

    They are formatted in place: ruff looks at the directories around a file to know the project's own imports.
    """
    paths = [name for name in names if name.endswith(".py")]
    for command in ("check --quiet --fix --select F401", "check --quiet --fix --select I", "format --quiet"):
        done = subprocess.run(
            [tool("ruff"), *command.split(), *paths], cwd=root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UnsupportedError(f"what would be written is no Python that ruff can read: {done.stdout}{done.stderr}")
    return {name: (root / name).read_text(encoding="utf-8") for name in paths}


@contextlib.contextmanager
def staged(checkout: Path, files: Mapping[str, Any]) -> Iterator[Path]:
    """A copy of what matters, with `files` in it: what is written is tried there first."""
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-port-") as directory:
        root = Path(directory) / "checkout"
        root.mkdir()
        for name in _STAGED:
            source = checkout / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        write(root, files)
        yield root


def node_schemas(root: Path) -> dict[str, Any]:
    """What the pack at `root` declares to ComfyUI, recorded by the stand-in of its tests."""
    with tempfile.TemporaryDirectory() as models:
        command = [sys.executable, "-P", str(root / "tests/comfy_pack/stand_in.py"), str(root), models]
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=models)
    if done.returncode:
        raise UnsupportedError(
            f"the pack with the new nodes cannot be loaded; nothing was written:\n{done.stderr[-2000:]}"
        )
    nodes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["nodes"]
    return nodes


def check_writable(checkout: Path, files: Iterable[str]) -> None:
    """Before the work is done: the directories that the files go into, as far as they are there."""
    for file in files:
        path = (checkout / file).parent
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_dir():
            raise InvalidValueError(f"{path} is no directory, and {file} must go there; move it away")
        if not os.access(path, os.W_OK | os.X_OK):
            raise InvalidValueError(f"{path} cannot be written to, and {file} must go there; change its permissions")


def write(root: Path, files: Mapping[str, str | bytes | Link]) -> None:
    """All of them; if one cannot be written, the others are as they were."""
    # What is to be done is noted before it is: a signal may come in between.
    before: list[tuple[Path, bytes | None]] = []
    made: list[Path] = []
    try:
        for name, content in files.items():
            path = root / name
            made += reversed([parent for parent in path.parents if not os.path.lexists(parent)])
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path) and (isinstance(content, Link) or not path.is_file()):
                raise FileExistsError(errno.EEXIST, "is there already", str(path))
            before.append((path, path.read_bytes() if path.is_file() else None))
            if isinstance(content, Link):
                path.symlink_to(content.to)
            else:
                _replace(path, content.encode() if isinstance(content, str) else content)
    except BaseException as error:
        left = _put_back(before, made)
        also = f", but {', '.join(left)} could not be put back" if left else ""
        if isinstance(error, OSError):
            raise InvalidValueError(
                f"{error.filename or name} cannot be written ({error.strerror or error}); everything is as it was{also}"
            ) from error
        raise


def _put_back(before: Iterable[tuple[Path, bytes | None]], made: Iterable[Path]) -> list[str]:
    """Returns what could not be."""
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
