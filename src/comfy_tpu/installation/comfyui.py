"""Checks that a directory is a ComfyUI and recent enough. Nothing in it is executed."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from comfy_tpu.errors import InvalidValueError

_FILES = ("main.py", "nodes.py", "comfy")
_RELEASES = "https://github.com/comfyanonymous/ComfyUI/releases"
_VERSION_FILE = "comfyui_version.py"  # since 0.3.12


@dataclasses.dataclass(frozen=True)
class ComfyUI:
    directory: Path
    version: str | None
    """The version; None for a ComfyUI that is older than its version file."""

    @classmethod
    def open(cls, directory: Path) -> ComfyUI:
        directory = directory.expanduser().absolute()
        _check_directory(directory)
        return cls(directory, _version(directory))

    def check_version(self, required: SpecifierSet) -> None:
        if self.version is None or not required.contains(self.version, prereleases=True):
            raise InvalidValueError(
                f"comfyui_dir={self.directory} holds ComfyUI {self.version or 'of an unknown version'}; "
                f"needs {required}: {self._update_advice}",
                field="comfyui_dir",
            )

    @property
    def _update_advice(self) -> str:
        if not (self.directory / ".git").exists():
            return f"it is no git clone, so take a newer one: {_RELEASES}"
        # Its releases are tags, and where one is checked out there is no branch to pull.
        git = f"git -C {shlex.quote(str(self.directory))}"
        return f"update it: {git} checkout master && {git} pull"

    @property
    def custom_nodes(self) -> Path:
        return self.directory / "custom_nodes"


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise InvalidValueError(
            f"comfyui_dir={directory} {state}; give the directory that holds ComfyUI's main.py", field="comfyui_dir"
        )
    missing = _missing(directory)
    if not missing:
        return
    inner = directory / "ComfyUI"  # the portable package, and many a container, have it one level down
    advice = f"it is in {inner}" if not _missing(inner) else "give the directory that holds ComfyUI's main.py"
    raise InvalidValueError(
        f"comfyui_dir={directory} is not ComfyUI: no {', '.join(missing)} in it; {advice}", field="comfyui_dir"
    )


def _missing(directory: Path) -> list[str]:
    return [name for name in _FILES if not (directory / name).exists()]


def _version(directory: Path) -> str | None:
    file = directory / _VERSION_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    try:
        return str(Version(found[1])) if found else None
    except InvalidVersion:
        return None
