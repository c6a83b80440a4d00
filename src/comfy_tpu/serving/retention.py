"""Removes what is not kept any longer: finished jobs beyond their time or the limit of bytes, and files of no job."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from comfy_tpu.jobs.served_ledger import OVER, Record, ServedLedger
from comfy_tpu.serving.config import Retention

logger = logging.getLogger(__name__)

_JOB_FILE = re.compile(r"(video|image|stage)_[0-9a-f]{24}")
_SWEEP_SECONDS = 60.0
_STRAY_SECONDS = 3600.0


class Sweeper:
    """A thread that removes them, once a minute."""

    def __init__(
        self,
        ledger: ServedLedger,
        directory: Path,
        inputs: Path,
        kept: Retention,
        remove: Callable[[Record], None],
        *,
        seconds: float = _SWEEP_SECONDS,
    ) -> None:
        """`directory`: of the finished files. `inputs`: of what clients sent. `remove`: a job with its files."""
        self._ledger, self._directory, self._inputs = ledger, directory, inputs
        self._kept, self._remove, self._seconds = kept, remove, seconds
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._try(self._remove_stray_outputs)
        while not self._is_closed.wait(self._seconds):
            self._try(self.sweep)

    @staticmethod
    def _try(action: Callable[[], None]) -> None:
        """A disk that is full, or a ledger that another process holds, ends neither the thread nor the retention."""
        try:
            action()
        except Exception:
            logger.exception("what is not kept any longer could not be removed; it is tried again")

    def sweep(self) -> None:
        for record in self._ledger.finished_before(time.time() - self._kept.seconds):
            self._remove(record)
        self._remove_strays()
        for id_ in self._ledger.finished_beyond(self._kept.bytes):
            if (found := self._ledger.find(id_)) is not None:
                self._remove(found)

    def _remove_strays(self) -> None:
        """Inputs that no job needs: their server was killed while they came, or before it removed them. What is new may
        be coming, to this server or to another."""
        for path in self._inputs.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime <= _STRAY_SECONDS:
                    continue
                record = self._ledger.find(path.name.partition("-")[0])
                if record is None or record.state in OVER:
                    path.unlink()

    def _remove_stray_outputs(self) -> None:
        """Files of jobs that were cancelled or removed: their server was killed before it removed the file."""
        for path in self._directory.iterdir():
            if (match := _JOB_FILE.match(path.name)) is None:
                continue
            record = self._ledger.find(match[0])
            # One without a record may be a job's of another ledger: of a damaged one, or of this one's newer copy.
            is_stray = self._ledger.was_removed(match[0]) if record is None else record.state in ("failed", "cancelled")
            if is_stray:
                path.unlink(missing_ok=True)
