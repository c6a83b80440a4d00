"""A thread that carries jobs out, one group after the other. It imports neither torch nor jax; its executor may."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import CancelledError, Event, Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline.progress import FetchPreview, Progress, ProgressCallback

ROWS_MAX = 8
"""The most jobs of a group whose batch size is to be chosen."""
GROUPS_AHEAD = 2
"""Groups that are leased: one that runs, and the next, so that the devices do not wait for the ledger."""


class JobExecutor(Protocol):
    """What carries jobs out: `execution.Executor`."""

    @property
    def current_jobs(self) -> tuple[str, ...]:
        """The ids of the jobs that the calling thread works on."""
        ...

    def run(self, jobs: Sequence[Job]) -> None:
        """Reports an outcome for each job, perhaps after it has returned."""
        ...

    def render_previews(self, fetch: FetchPreview, wanted: Collection[str]) -> tuple[bytes, ...]:
        """As `Event.previews`, of the jobs that the calling thread works on."""
        ...

    def close(self) -> None:
        """Waits for outcomes that are to come."""
        ...


MakeExecutor = Callable[[Callable[[Outcome], None], ProgressCallback], JobExecutor]
"""Makes an executor that reports outcomes and progress to these two."""


class WorkerThread:
    """Workers of a driver: one, in a thread of its process."""

    def __init__(
        self, name: str, group_size: int, make_executor: MakeExecutor, previews: PreviewRate | None = None
    ) -> None:
        """`previews`: None: there are none."""
        self._name = name
        self._preview_rate = previews
        self._group_size = group_size
        # Not queue.Queue: Ctrl-C in the middle of its `put` may leave a waiter behind that takes the next wake-up, and
        # the thread would never learn that there are no more groups.
        self._groups: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._happened: queue.SimpleQueue[Outcome | Event] = queue.SimpleQueue()
        self._last: Request | None = None
        # Two counts, each changed by one thread only: `+=` of two threads would lose some.
        self._given = 0
        self._carried_out = 0
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()
        """Of the two sets below, where an outcome and a cancellation may meet."""
        self._at_work: set[str] = set()
        """The ids of jobs that were given and have no outcome."""
        self._unwanted: set[str] = set()
        """Those of them that were cancelled one by one."""
        self._failure: BaseException | None = None
        self._executor = make_executor(self._report, self._on_progress)
        self._thread = threading.Thread(target=self._run, name="jobs")
        self._thread.start()

    @property
    def count(self) -> int:
        return 1

    def capacity(self, waiting: int) -> int:
        is_free = self._given - self._carried_out < GROUPS_AHEAD
        return self._group_size if is_free and not self._is_cancelled.is_set() else 0

    def preference(self) -> tuple[str | None, str | None]:
        return (None, None) if self._last is None else (self._last.model_key, self._last.shape_key)

    def give(self, jobs: list[Job]) -> str:
        self._given += 1
        self._last = jobs[0].request
        self._at_work.update([job.id for job in jobs])  # at once, and without the lock: Ctrl-C may come anywhere here
        self._groups.put(jobs)
        return self._name

    def wait(self, timeout: float) -> list[Outcome | Event]:
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(queue.Empty):
            happened = [self._happened.get(timeout=timeout) if timeout > 0 else self._happened.get_nowait()]
            with contextlib.suppress(queue.Empty):
                while True:
                    happened.append(self._happened.get_nowait())
            return happened
        return []

    def cancel(self) -> None:
        """At the end of the step that is running. The jobs that were given are returned."""
        self._is_cancelled.set()

    def cancel_job(self, id_: str) -> None:
        """Ends one job at the end of the step that is running. Those that share its steps go on, and it with them."""
        with self._lock:
            if id_ in self._at_work:
                self._unwanted.add(id_)

    def close(self) -> None:
        """Waits for the jobs that were given, or for the step that is running where they were cancelled."""
        self._groups.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (jobs := self._groups.get()) is not None:
                wanted = [] if self._is_cancelled.is_set() else [job for job in jobs if job.id not in self._unwanted]
                for job in jobs:
                    if job not in wanted:
                        self._report(Outcome(job.id, "returned"))
                if wanted:
                    self._executor.run(wanted)
                self._carried_out += 1
        except BaseException as error:  # noqa: BLE001 - the driver's thread raises it
            self._failure = error
        finally:
            self._executor.close()

    def _report(self, outcome: Outcome) -> None:
        with self._lock:
            self._at_work.discard(outcome.id)
            self._unwanted.discard(outcome.id)
        self._happened.put(outcome)

    def _on_progress(self, progress: Progress) -> None:
        jobs = self._executor.current_jobs
        if self._is_cancelled.is_set() or (jobs and self._unwanted.issuperset(jobs)):
            raise CancelledError
        previews = self._render_previews(progress, jobs)
        plain = dataclasses.replace(progress, preview=None)
        counted = (progress.stage, progress.label, progress.done, progress.total)
        self._happened.put(Event(self._name, *counted, jobs, previews, plain))

    def _render_previews(self, progress: Progress, jobs: tuple[str, ...]) -> tuple[bytes, ...]:
        if progress.preview is None or self._preview_rate is None:
            return ()
        wanted = self._preview_rate.take_due(jobs)
        if not wanted:
            return ()
        begun = time.monotonic()
        previews = self._executor.render_previews(progress.preview, wanted)
        self._preview_rate.spent(time.monotonic() - begun)
        return previews
