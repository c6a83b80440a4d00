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

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._file)


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


def _lock_path(ledger: Path, token: str) -> Path:
    return ledger.with_name(f"{ledger.name}-{token}.lock")
