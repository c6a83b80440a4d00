"""What a server's workers have done since it began."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterable, Mapping

from comfy_tpu.jobs.outcome import Event, Outcome

STEP_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper limits in seconds, for the histogram of steps."""
PREPARATIONS = ("loading", "compiling")
"""Stages that a job has or has not, by what was made before it."""
_STAGES = (*PREPARATIONS, "encoding", "denoising", "decoding", "total")


class Activity:
    """Told by the scheduler's thread; may be read from any."""

    def __init__(self) -> None:
        self.stage_seconds: dict[str, float] = dict.fromkeys(_STAGES, 0.0)
        """Of finished jobs."""
        self.finished = {"done": 0, "failed": 0, "cancelled": 0}
        self.steps = 0
        """Denoising steps."""
        self.step_seconds = 0.0
        """Of the steps that are in `step_counts`: the first of a job has none before it."""
        self.step_counts = [0] * (len(STEP_BUCKETS) + 1)
        self.programs = {"compiled": 0, "cached": 0}
        """Programs that were made ready."""
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._at_work: set[str] = set()
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._last_steps: dict[tuple[str, ...], tuple[int, float]] = {}
        self._preparing: dict[tuple[tuple[str, ...], str, str], float] = {}
        """Since when, by jobs, stage and what is loaded or compiled."""
        self._prepared: dict[str, dict[str, float]] = {}
        """Seconds by stage, by the job that waited for them."""

    def begin(self, jobs: Iterable[str]) -> None:
        """Jobs were given to a worker."""
        with self._lock:
            if not self._at_work:
                self._busy_since = time.monotonic()
            self._at_work.update(jobs)

    def note(self, event: Event) -> None:
        progress = event.progress
        if progress is not None and progress.stage == "compiling" and progress.done:
            self.programs["cached" if progress.from_cache else "compiled"] += 1
        now = time.monotonic()
        if event.stage in PREPARATIONS:
            self._note_preparation(event, now)
        if event.stage != "denoising":
            return
        if event.done:
            self.steps += 1
            done, at = self._last_steps.get(event.jobs, (0, now))
            if 0 < done < event.done:
                seconds = (now - at) / (event.done - done)
                self.step_seconds += now - at
                self.step_counts[bisect.bisect_left(STEP_BUCKETS, seconds)] += event.done - done
        self._last_steps[event.jobs] = (event.done, now)
        if event.done == event.total:
            self._last_steps.pop(event.jobs, None)

    def _note_preparation(self, event: Event, now: float) -> None:
        key = (event.jobs, event.stage, event.what)
        begun = self._preparing.setdefault(key, now)
        if event.done < event.total:
            return
        del self._preparing[key]
        for id_ in self._at_work.intersection(event.jobs):
            seconds = self._prepared.setdefault(id_, {})
            seconds[event.stage] = seconds.get(event.stage, 0.0) + now - begun

    def preparation_seconds(self, id_: str) -> Mapping[str, float]:
        """How long a job at work waited until weights were loaded and programs compiled."""
        return dict(self._prepared.get(id_, {}))

    def end(self, outcome: Outcome, state: str) -> None:
        with self._lock:
            self._at_work.discard(outcome.id)
            self._prepared.pop(outcome.id, None)
            if not self._at_work:
                self._preparing.clear()
                self._busy_seconds += time.monotonic() - self._busy_since
                self._last_steps.clear()
        if state in self.finished:
            self.finished[state] += 1
        for stage, seconds in outcome.seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    @property
    def idle_share(self) -> float:
        """The share of the time in which no worker had a job."""
        with self._lock:
            now = time.monotonic()
            busy = self._busy_seconds + (now - self._busy_since if self._at_work else 0.0)
            return max(0.0, 1.0 - busy / max(now - self._began, 1e-9))
