"""The disk under a path: which one it is, and how much of it is free."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 1_000_000_000
"""Left free by a download: a full disk stops more than that."""


@dataclasses.dataclass(frozen=True)
class Disk:
    path: Path
    """Where the disk is mounted."""
    device: str
    """Such as /dev/sda1; empty where the system does not say."""
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.path} ({self.device})" if self.device else str(self.path)


def has_room(free_bytes: int, nbytes: int) -> bool:
    """Whether this many more bytes may be downloaded to a disk with so much room. Nothing always may."""
    return nbytes <= 0 or nbytes + RESERVE_BYTES <= free_bytes


def find_disk(path: Path) -> Disk:
    """The disk of a path, which need not exist yet."""
    absolute = path.absolute()
    nearest = next(each for each in (absolute, *absolute.parents) if each.exists()).resolve()
    mount = next(each for each in (nearest, *nearest.parents) if os.path.ismount(each))
    return Disk(mount, _device(mount), shutil.disk_usage(nearest).free)


def _device(mount: Path, mounts: Path = Path("/proc/mounts")) -> str:
    if not mounts.is_file():
        return ""
    rows = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    found = [row[0] for row in rows if len(row) > 1 and row[1].replace("\\040", " ") == str(mount)]
    return found[-1] if found else ""
