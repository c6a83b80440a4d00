"""When a worker makes previews: for jobs that somebody watches, and seldom enough not to slow their steps down."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

_SECONDS = 0.7
"""Between two previews of a job."""
_SHARE = 0.05
"""Of a worker's time that previews may take: one that took 100 ms is followed by 2 s without."""


class PreviewRate:
    def __init__(self, *, seconds: float = _SECONDS, share: float = _SHARE) -> None:
        self._seconds, self._share = seconds, share
        self._lock = threading.Lock()
        self._watchers = collections.Counter[str]()
        self._last: dict[str, float] = {}
        """When a preview of a watched job was begun."""
        self._rests_until = 0.0

    @contextlib.contextmanager
    def watching(self, id_: str) -> Iterator[None]:
        """Somebody wants previews of this job meanwhile."""
        with self._lock:
            self._watchers[id_] += 1
        try:
            yield
        finally:
            with self._lock:
                self._watchers[id_] -= 1
                if not self._watchers[id_]:
                    del self._watchers[id_]
                    self._last.pop(id_, None)

    def watched(self) -> tuple[str, ...]:
        """The jobs that somebody watches."""
        with self._lock:
            return tuple(self._watchers)

    def watch(self, jobs: Sequence[str]) -> None:
        """These are watched, and no others: what the process that knows the watchers told a worker of another one."""
        with self._lock:
            self._watchers = collections.Counter(jobs)
            self._last = {id_: at for id_, at in self._last.items() if id_ in self._watchers}

    def take_due(self, jobs: Sequence[str]) -> frozenset[str]:
        """Those of the jobs whose previews are to be made now. May be called from several threads."""
        now = time.monotonic()
        with self._lock:
            if now < self._rests_until:
                return frozenset()
            due = [id_ for id_ in jobs if id_ in self._watchers and now - self._last.get(id_, 0.0) >= self._seconds]
            self._last.update(dict.fromkeys(due, now))
        return frozenset(due)

    def spent(self, seconds: float) -> None:
        """Previews took this long."""
        with self._lock:
            self._rests_until = time.monotonic() + seconds / self._share
