"""Carries out the ledger's jobs, from the start of a server to its end."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.driver import Workers
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import LEASE_SECONDS, Job
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.served_ledger import ServedLedger

logger = logging.getLogger(__name__)

_RENEW_SECONDS = LEASE_SECONDS / 6
_IDLE_SECONDS = 0.03
"""How long a server that has nothing to do waits before it looks for jobs: an order to an idle server waits half of it.
A look takes 0.1 ms."""


class JobWorkers(Workers, Protocol):
    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def cancel_job(self, id_: str) -> None: ...
    def close(self) -> None: ...


class Scheduler:
    """A thread that leases jobs, gives them to workers and records what becomes of them."""

    def __init__(
        self,
        ledger: ServedLedger,
        folder: Folder,
        workers: JobWorkers,
        *,
        first: Job,
        on_given: Callable[[list[Job]], None],
        on_event: Callable[[Event], None],
        on_outcome: Callable[[Outcome, str], None],
    ) -> None:
        """`first`: a job that is not in the ledger, and is carried out before all others. `on_outcome` is told the
        state that the ledger has after it."""
        self._ledger, self._folder, self._workers = ledger, folder, workers
        self._first = first
        self._waiting_first: Job | None = first
        self._on_given, self._on_event, self._on_outcome = on_given, on_event, on_outcome
        self._is_stopped = threading.Event()
        self.failure: BaseException | None = None
        """What ended it, where that was not `close`."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the running jobs at their next step, and gives them back."""
        self._is_stopped.set()
        self._workers.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._workers.close()
        for happened in self._workers.wait(0.0):
            if isinstance(happened, Outcome):
                self._record(happened)

    def cancel_job(self, id_: str) -> None:
        self._workers.cancel_job(id_)

    def _run(self) -> None:
        renewed = time.monotonic()
        try:
            while not self._is_stopped.is_set():
                if time.monotonic() - renewed > _RENEW_SECONDS:
                    self._ledger.renew()
                    renewed = time.monotonic()
                self._give()
                for happened in self._workers.wait(_IDLE_SECONDS):
                    if isinstance(happened, Event):
                        self._on_event(happened)
                    else:
                        self._record(happened)
        except BaseException as error:
            self.failure = error
            logger.exception("the scheduler ended")

    def _give(self) -> None:
        while (wanted := self._workers.capacity(max(1, self._ledger.waiting_count()))) > 0:
            if self._waiting_first is not None:
                jobs, self._waiting_first = [self._waiting_first], None
            else:
                jobs = self._ledger.lease_fairly(wanted, shape_key=self._workers.preference()[1])
            if not jobs:
                return
            self._on_given(jobs)
            self._ledger.start([job.id for job in jobs], self._workers.give(jobs))

    def _record(self, outcome: Outcome) -> None:
        if outcome.state == "done":
            try:
                for name, content in outcome.contents:
                    self._folder.receive(name, content)
            except (ComfyTpuError, OSError) as error:
                outcome = dataclasses.replace(outcome, state="failed", error=str(error))
        if outcome.state == "done":
            state = "done" if self._ledger.finish(outcome.id, outcome.outputs, outcome.seconds) else "cancelled"
        elif outcome.state == "failed":
            state = self._ledger.fail(outcome.id, outcome.error, is_final=outcome.is_final) or "cancelled"
        else:
            self._ledger.give_back([outcome.id], lost=outcome.is_lost)
            state = "returned"
            if outcome.id == self._first.id:
                self._waiting_first = self._first
        self._on_outcome(outcome, state)
