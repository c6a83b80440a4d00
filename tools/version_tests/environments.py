"""A virtual environment for each Python, with the oldest and with the newest versions that pyproject.toml allows."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

PACKAGES = ("torch", "jax", "torchax", "transformers", "diffusers")
"""What is varied; pip takes the newest of everything else."""
Age = Literal["oldest", "newest"]


class InstallationError(Exception):
    """A Python that is not there, or an installation that failed."""


@dataclasses.dataclass(frozen=True)
class Environment:
    python: str
    """Such as 3.12."""
    age: Age

    @property
    def name(self) -> str:
        return f"{self.python}-{self.age}"


def find_python(version: str) -> Path:
    """The interpreter of a version: on PATH, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return Path(found)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for directory in sorted(root.glob(f"versions/{version}.*"), reverse=True):
        if (directory / "bin" / "python").is_file():
            return directory / "bin" / "python"
    raise InstallationError(f"Python {version} is not on PATH and not among pyenv's versions; install it")


def oldest_requirements(pyproject: Path) -> list[str]:
    """`name==version` for the lower bounds of PACKAGES."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    pinned = []
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.name in PACKAGES:
            bounds = [each for each in requirement.specifier if each.operator == ">="]
            if len(bounds) != 1:
                raise InstallationError(f"{requirement} is no lower bound; write it as >=")
            pinned.append(f"{requirement.name}=={bounds[0].version}")
    return pinned


def make_environment(environment: Environment, root: Path, place: Path, test_tools: Iterable[str]) -> Path:
    """Installs the checkout at `root` and returns the Python of its new environment at `place`."""
    subprocess.run([find_python(environment.python), "-m", "venv", "--clear", place], check=True)
    python = place / "bin" / "python"
    wanted = [*test_tools, *(oldest_requirements(root / "pyproject.toml") if environment.age == "oldest" else ())]
    command = [python, "-m", "pip", "install", "-q", "--no-input", "--no-compile", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-e", root, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallationError(f"the versions of {environment.name} cannot be installed:\n{done.stderr.strip()}")
    return python


def installed_versions(python: Path) -> dict[str, str]:
    """The versions of PACKAGES, without local labels such as +cpu."""
    code = f"from importlib.metadata import version\nfor name in {PACKAGES!r}: print(version(name))"
    lines = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {name: line.partition("+")[0] for name, line in zip(PACKAGES, lines, strict=True)}
