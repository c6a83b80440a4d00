"""Room for the files that clients send, reserved before the first of their bytes is written."""

from __future__ import annotations

import collections
import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from starlette.exceptions import HTTPException

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.served_ledger import QueueFullError, ServedLedger

_FREE_BYTES = 256 * 2**20
"""Of the disk that stay free, for results and the ledger."""


class UnavailableError(ComfyTpuError):
    """No job can be carried out, for now or until somebody mends the server."""


class InputRoom:
    """May be used from any thread."""

    def __init__(self, ledger: ServedLedger, directory: Path, most: int) -> None:
        """`most`: bytes that one client may have in files of jobs that are not over."""
        self._ledger, self._directory, self._most = ledger, directory, most
        self._lock = threading.Lock()
        self._reserved = collections.Counter[str]()
        """Bytes that are on their way, by client."""

    @contextlib.contextmanager
    def reserve(self, client: str, size: int) -> Iterator[None]:
        """Raises QueueFullError where the client has too much here already, UnavailableError where the disk has, and
        HTTPException where the size is more than a client may ever have."""
        if size > self._most:
            raise HTTPException(
                413,
                f"the body counts as {size} bytes, and files of one client may have {self._most} here; send less, or a "
                "Content-Length: without it a body counts as the largest that is taken",
            )
        with self._lock:
            # The ledger is read in here: a body that was accepted after that still has its reservation.
            self._check(client, size, self._ledger.input_bytes())
            self._reserved[client] += size
        try:
            yield
        finally:
            with self._lock:
                self._reserved[client] -= size

    def _check(self, client: str, size: int, waiting: Mapping[str, int]) -> None:
        held = waiting.get(client, 0) + self._reserved[client]
        if held + size > self._most:
            raise QueueFullError(
                f"files of {held / 1e6:.0f} MB are here for jobs that wait, {size / 1e6:.0f} MB more were sent, and "
                f"{self._most / 1e6:.0f} MB are the most; try again later"
            )
        free = shutil.disk_usage(self._directory).free - self._reserved.total()
        if free - size < _FREE_BYTES:
            raise UnavailableError(f"the server's disk has {max(0, free) / 1e6:.0f} MB left; try again later")


def read_length(headers: Mapping[str, str], most: int) -> int:
    """The bytes of a body; as many as it may have where it does not say."""
    given = headers.get("content-length", "")
    return int(given) if given.isdecimal() else most
