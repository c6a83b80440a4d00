"""The files of the pack: in the repository when run from a checkout, else in the installed wheel."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

import comfy_tpu
from comfy_tpu.distribution import restore_command
from comfy_tpu.errors import ComfyTpuError

FILES = ("__init__.py", "pyproject.toml", "web", "locales", "example_workflows", "docs")
"""Files that ComfyUI reads, and pages that messages mention; the wheel holds the same (pyproject.toml)."""

_ENTRY = "comfy_tpu.comfy"
"""A module that every version of our entry point imports."""
_FAMILY_ENTRY = "family_entrypoint"
"""A function that the packs of single families (`port new --pack`) import from that module."""


@dataclasses.dataclass(frozen=True)
class Pack:
    directory: Path

    @classmethod
    def here(cls) -> Pack:
        package = Path(comfy_tpu.__file__).resolve().parent
        for directory in (package.parents[1], package / "_pack"):
            if all((directory / name).exists() for name in FILES):
                return cls(directory)
        raise ComfyTpuError(
            f"the files of the ComfyUI pack ({', '.join(FILES)}) are neither around {package} nor inside it; "
            f"restore them: {restore_command(*FILES)}"
        )

    @property
    def required_comfyui(self) -> SpecifierSet:
        project = tomllib.loads((self.directory / "pyproject.toml").read_text(encoding="utf-8"))
        return SpecifierSet(project["tool"]["comfy"]["requires-comfyui"])


def is_pack(directory: Path) -> bool:
    """Whether a directory holds this pack, of any version."""
    entry = directory / "__init__.py"
    text = entry.read_text(encoding="utf-8", errors="replace") if entry.is_file() else ""
    return _ENTRY in text and _FAMILY_ENTRY not in text
