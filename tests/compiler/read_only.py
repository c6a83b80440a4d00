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
    if os.geteuid() != 0:
        directory.chmod(0o555)
        try:
            yield
        finally:
            directory.chmod(0o755)
        return
    try:
        subprocess.run(["chattr", "+i", directory], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip(
            "root may write into every directory, and chattr +i, which stops even root, does not work here: run the "
            "tests as a user, or with --basetemp on ext4, XFS or btrfs"
        )
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", directory], capture_output=True, check=True)
