"""The versions that `make test-versions` passed with. The README names them, and the doctor says what is newer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from comfy_tpu.json_input import read_json

FILE = Path(__file__).with_name("tested_versions.json")


def read_tested_versions(file: Path = FILE) -> dict[str, tuple[str, ...]]:
    """The versions of Python and of each package, in ascending order."""
    runs: Sequence[dict[str, Any]] = read_json(file)["runs"]
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in {"python": run["python"], **run["packages"]}.items():
            found.setdefault(name, set()).add(version)
    return {name: tuple(sorted(versions, key=Version)) for name, versions in found.items()}


def describe_newer(version: str, tested: Sequence[str]) -> str:
    """A note to a version that is newer than all that were tested; else empty."""
    if not tested or Version(version) <= Version(tested[-1]):
        return ""
    return f" (newer than {tested[-1]}, the newest tested)"


def find_bounds(names: Iterable[str], file: Path = FILE) -> dict[str, str]:
    """What pip may install of each package: from the oldest tested, to before the minor version after the newest."""
    tested = read_tested_versions(file)
    return {name: f">={tested[name][0]},<{_next_minor(tested[name][-1])}" for name in names}


def _next_minor(version: str) -> str:
    """2.16 after 2.15.1, and 0.0.14 after 0.0.13."""
    release = Version(version).release
    place = max(1, next((index for index, number in enumerate(release) if number), 0))
    return ".".join(map(str, (*release[:place], release[place] + 1)))
