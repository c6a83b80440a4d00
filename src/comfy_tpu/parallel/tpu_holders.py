"""Whether this machine has a TPU, and which processes hold it. Reads /dev, /proc and /sys, and starts nothing.

libtpu gives a TPU to one process at a time. The process has the chips' device files open, and a lock on libtpu's lock
file; files of another user's process can be listed by root only, locks by everybody.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from comfy_tpu.terminal_text import excerpt

ROOT = Path("/")
LOCK_FILE = "tmp/libtpu_lockfile"

_DEVICE = re.compile(r"/dev/(accel\d+|vfio/\d+)")
_GOOGLE = "0x1ae0"
_HOLDER = re.compile(r"in use by (?:a )?process with pid (\d+)")
"""In libtpu's own message."""


@dataclasses.dataclass(frozen=True)
class TpuHolder:
    """A process that holds the TPU."""

    pid: int
    command: str
    """Its command line; empty where that cannot be read."""
    user: str
    """A name, or a number that has none; empty where that cannot be read."""

    def __str__(self) -> str:
        known = ", ".join(filter(None, (excerpt(self.command), self.user and f"user {self.user}")))
        return f"process {self.pid}{f' ({known})' if known else ''}"


def find_tpu(root: Path = ROOT) -> str | None:
    """Where a TPU shows, as "/dev/accel0"; None where this machine has none."""
    for device in sorted((root / "dev").glob("accel[0-9]*")):
        return f"/dev/{device.name}"
    # Newer TPU machines bind the chips to vfio, where their device files look like anybody's: of a machine whose PCI
    # devices can be listed, those say whose they are.
    listed = False
    for vendor, kind, address in _list_pci(root):
        listed = True
        # Google's other PCI functions in a virtual machine are its network card (class 02) and its disks (class 01).
        if vendor == _GOOGLE and not kind.startswith(("0x01", "0x02")):
            return f"PCI {address}"
    if not listed:
        for device in sorted((root / "dev/vfio").glob("[0-9]*")):
            return f"/dev/vfio/{device.name}"
    return None


def _list_pci(root: Path) -> Iterator[tuple[str, str, str]]:
    """Vendor, class and address of each device."""
    for file in sorted((root / "sys/bus/pci/devices").glob("*/vendor")):
        try:
            yield file.read_text().strip(), (file.parent / "class").read_text().strip(), file.parent.name
        except OSError:
            continue


def find_holders(root: Path = ROOT, message: str = "") -> tuple[TpuHolder, ...]:
    """The other processes that hold the TPU, as far as this user may know. `message`: what libtpu said, which may name
    one."""
    pids = {int(pid) for pid in _HOLDER.findall(message)} | _locking_pids(root)
    if find_tpu(root) is not None:  # elsewhere vfio has somebody else's devices
        pids |= {int(process.name) for process in _list_processes(root) if _has_open(process)}
    return tuple(_describe(root, pid) for pid in sorted(pids - {os.getpid()}))


def lock_owner(root: Path = ROOT) -> str | None:
    """The user whose process made libtpu's lock file; None where there is none. It may be left from one that died."""
    try:
        return _user_name((root / LOCK_FILE).stat().st_uid)
    except OSError:
        return None


def _list_processes(root: Path) -> list[Path]:
    try:
        return [path for path in (root / "proc").iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _has_open(process: Path) -> bool:
    """A chip, or libtpu's lock file."""
    try:
        opened = list((process / "fd").iterdir())
    except OSError:  # another user's, or gone meanwhile
        return False
    for file in opened:
        try:
            target = str(file.readlink())
        except OSError:
            continue
        if _DEVICE.fullmatch(target) or target == f"/{LOCK_FILE}":
            return True
    return False


def _locking_pids(root: Path) -> set[int]:
    """Of libtpu's lock file, by its inode: /proc/locks shows locks of all users' processes."""
    try:
        inode = (root / LOCK_FILE).stat().st_ino
        lines = (root / "proc/locks").read_text().splitlines()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  WRITE 4711 fd:01:131075 0 EOF
    found = (re.fullmatch(r"\d+: (?!->)\S+\s+\S+\s+\S+\s+(\d+) \w+:\w+:(\d+) .*", line) for line in lines)
    return {int(match[1]) for match in found if match is not None and int(match[2]) == inode}


def _describe(root: Path, pid: int) -> TpuHolder:
    process = root / "proc" / str(pid)
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        command = " ".join(shlex.join(words).removesuffix(" ''").split())
    except OSError:
        command = ""
    try:
        found = re.search(r"^Uid:\s+(\d+)", (process / "status").read_text(errors="replace"), re.MULTILINE)
        user = _user_name(int(found[1])) if found else ""
    except OSError:
        user = ""
    return TpuHolder(pid, command, user)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe_use(root: Path = ROOT, message: str = "") -> tuple[str, str] | None:
    """Who holds the TPU, and what to do about it; None where nothing says that it is held."""
    holders = find_holders(root, message)
    if holders:
        pids = " ".join(str(holder.pid) for holder in holders)
        return f"it is held by {' and '.join(map(str, holders))}", f"end that first (kill {pids})"
    if re.search(r"libtpu_lockfile|libtpu\.so.* already in use|TPU is already in use", message):
        owner = lock_owner(root)
        whose = f", perhaps of user {owner}, who made /{LOCK_FILE}" if owner else ""
        return (
            f"it is held by another process{whose}",
            f"end that process (`sudo comfy-tpu doctor` names it), or if there is none: sudo rm /{LOCK_FILE}",
        )
    return None
