"""Directories that nobody can write, not even root, to whom permissions mean nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nothing can be added to `directory` or removed from it inside the block."""
    lock, unlock = (("chmod", "555"), ("chmod", "755")) if os.geteuid() else (("chattr", "+i"), ("chattr", "-i"))
    try:
        subprocess.run([*lock, directory], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("root runs the tests, and the file system has no chattr +i: run as a user")
    try:
        yield
    finally:
        subprocess.run([*unlock, directory], capture_output=True, check=True)
