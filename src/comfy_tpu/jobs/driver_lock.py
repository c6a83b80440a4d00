"""Which drivers of a ledger are alive: each holds a lock on a file beside it, which the kernel releases at its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path


class DriverLock:
    """Held from its making to `release`, or to the end of the process, however it ends."""

    def __init__(self, ledger: Path, token: str) -> None:
        self._path = _lock_path(ledger, token)
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # where files cannot be locked, the time of the last renewal tells
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._file, "\n".join(_this_host()).encode())

    def renew(self) -> None:
        """Tells other hosts that the driver is alive."""
        with contextlib.suppress(OSError):
            os.utime(self._file)

    def find_other_host(self, ledger: Path, lease_seconds: float) -> str | None:
        """The name of another host that has the ledger open; by the clock of the file system alone."""
        now = os.fstat(self._file).st_mtime
        for path in ledger.parent.glob(f"{ledger.name}-*.lock"):
            with contextlib.suppress(OSError):
                name, _, boot = path.read_text(errors="replace").partition("\n")
                is_other = name not in ("", _this_host()[0]) and boot != _this_host()[1]
                if is_other and now - path.stat().st_mtime < lease_seconds:
                    return name
        return None

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._file)


def _this_host() -> tuple[str, str]:
    """The name, and what containers with names of their own share: one kernel, and so its locks and its memory."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename, boot


def is_alive(ledger: Path, token: str, host: str, seen_at: float, lease_seconds: float) -> bool:
    """Whether a driver is alive. One on another machine is until its leases run out: locks may not reach there."""
    path = _lock_path(ledger, token)
    if host != os.uname().nodename:
        return time.time() - seen_at < lease_seconds
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # it removes its file when it ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - seen_at < lease_seconds
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    finally:
        os.close(file)


def are_others_alive(ledger: Path) -> bool:
    """Whether a driver of this machine has the ledger open."""
    prefix = f"{ledger.name}-"
    tokens = [path.stem.removeprefix(prefix) for path in ledger.parent.glob(f"{prefix}*.lock")]
    return any(is_alive(ledger, token, os.uname().nodename, time.time(), 0.0) for token in tokens)


def _lock_path(ledger: Path, token: str) -> Path:
    return ledger.with_name(f"{ledger.name}-{token}.lock")
