"""The checkout that a family is written into: found, looked at, staged, and written to all at once or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
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
from comfy_tpu.errors import InvalidValueError, UnsupportedError

_MARKS = (
    "pyproject.toml",
    "src/comfy_tpu/families/ported.py",
    "tests/comfy_pack/stand_in.py",
    "tests/families/ported.py",
)
_STAGED = ("src", "tests", "tools", "__init__.py", "pyproject.toml")


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
        "are files there); git clone it and `pip install -e .[dev]`, or give its directory with --into"
    )


def check_name(name: str, checkout: Path) -> None:
    usable = name.isidentifier() and name == name.lower() and name.isascii() and not keyword.iskeyword(name)
    if not usable or name.startswith("_"):
        raise InvalidValueError(
            f"NAME={name!r} is no name for a module; use small letters, digits and _ such as pixart_sigma"
        )
    for file in (f"src/comfy_tpu/families/{name}.py", f"tests/families/test_{name}.py"):
        if (checkout / file).exists():
            raise InvalidValueError(
                f"NAME={name} is taken: {file} is there, and nothing is overwritten; choose another name"
            )


def tool(name: str) -> Path:
    for place in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (place / name).exists():
            return place / name
    found = shutil.which(name)
    if found is None:
        raise UnsupportedError(f"{name} is not here, which brings what is written into shape; pip install -e .[dev]")
    return Path(found)


def brought_into_shape(root: Path, names: Iterable[str]) -> dict[str, str]:
    """The staged files as the project's own are: imports in their order, lines of their length.

    In their places: which imports are the project's own is a question of which files there are.
    """
    paths = [name for name in names if name.endswith(".py")]
    for command in (["check", "--quiet", "--fix", "--select", "I"], ["format", "--quiet"]):
        done = subprocess.run([tool("ruff"), *command, *paths], cwd=root, capture_output=True, text=True, check=False)
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


def write(root: Path, files: Mapping[str, str | bytes | Link]) -> None:
    """All of them; if one cannot be written, the others are as they were."""
    before: list[tuple[Path, bytes | None]] = []
    try:
        for name, content in files.items():
            path = root / name
            old = path.read_bytes() if path.is_file() else None
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.to)
            else:
                _replace(path, content.encode() if isinstance(content, str) else content)
            before.append((path, old))
    except BaseException:
        for path, old in reversed(before):
            if old is not None:
                path.write_bytes(old)
            else:
                path.unlink(missing_ok=True)
        raise


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
