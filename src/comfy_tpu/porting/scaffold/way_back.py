"""How to take back what was written, as a command: computed before it is written, printed if its test does not pass."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection
from pathlib import Path


def way_back(checkout: Path, files: Collection[str], name: str) -> str:
    """One line for a shell. Files with changes that git does not have are left to whoever made them."""
    changed = [file for file in files if (checkout / file).exists()]
    new = dict.fromkeys(_first_new(checkout, file) for file in files if file not in changed)
    restored, kept = _by_git(checkout, changed)
    steps = [f"cd {shlex.quote(str(checkout))}"]
    if new:
        steps.append(shlex.join(["rm", "-r", "--", *new]))
    if restored:
        steps.append(shlex.join(["git", "restore", "--", *restored]))
    line = " && ".join(steps)
    if kept:
        line += f"  # and take the lines of {name} out of {', '.join(kept)}, of which git has no copy"
    return line


def _first_new(checkout: Path, file: str) -> str:
    """The file, or the highest of its directories that is not there."""
    path = checkout / file
    while not path.parent.exists():
        path = path.parent
    return path.relative_to(checkout).as_posix()


def _by_git(checkout: Path, changed: list[str]) -> tuple[list[str], list[str]]:
    """Those that `git restore` brings back as they are now, and the others."""
    clean = []
    for file in changed:
        known = _git(checkout, "ls-files", "--error-unmatch", "--", file)
        same = _git(checkout, "diff", "--quiet", "--", file)  # with the index, which is what `git restore` reads
        if known and same:
            clean.append(file)
    return clean, [file for file in changed if file not in clean]


def _git(checkout: Path, *arguments: str) -> bool:
    try:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
