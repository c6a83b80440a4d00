"""Carries out the ledger's jobs, from the start of a server to its end."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.driver import Workers
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import LEASE_SECONDS, Job, LedgerError
from comfy_tpu.jobs.outcome import Event, Outcome, outcome_of_error
from comfy_tpu.jobs.served_ledger import ServedLedger

logger = logging.getLogger(__name__)

_RENEW_SECONDS = LEASE_SECONDS / 6
_IDLE_SECONDS = 0.03
"""How long a server that has nothing to do waits before it looks for jobs: an order to an idle server waits half of it.
A look takes 0.1 ms."""
_COMPARE_SECONDS = 0.5
"""Between two looks at which of the running jobs were cancelled by another server of the directory."""
_RETRY_SECONDS = 1.0
"""Between two attempts to use a ledger that cannot be used."""
_DISK_SECONDS = 10.0
"""For which no job is begun after one whose file found no room: all of its steps would be made for nothing again."""


_MODEL_SECONDS = 300.0
"""For which a worker stays with the model that it loaded while others' jobs have their turn: to load one of 14B takes
minutes."""


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
        measure: Callable[[str], Mapping[str, float]],
        on_given: Callable[[list[Job]], None],
        on_event: Callable[[Event], None],
        on_outcome: Callable[[Outcome, str], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`first`: a job that is not in the ledger, and is carried out before all others. `measure`: seconds of a job
        by stage, besides those that its worker tells. `on_outcome` is told the state that the ledger has after it.
        `on_failure`: no job will be carried out any more."""
        self._ledger, self._folder, self._workers = ledger, folder, workers
        self._first = first
        self._waiting_first: Job | None = first
        self._measure, self._on_given, self._on_event = measure, on_given, on_event
        self._on_outcome, self._on_failure = on_outcome, on_failure
        self._is_stopped = threading.Event()
        self._at_work: set[str] = set()
        """Jobs that workers have, but for the first."""
        self._withdrawn: set[str] = set()
        """Those of them that another server cancelled."""
        self._happened: collections.deque[Outcome | Event] = collections.deque()
        """What workers told, and is not recorded yet."""
        self._renewed_at = self._compared_at = time.monotonic()
        self._paused_until = 0.0
        self._has_failed = False
        self._loaded: dict[str, str] = {}
        """The last model of each worker."""
        self._loaded_at: dict[str, float] = {}
        """When a worker last changed to a model."""
        self._trouble = ("", 0.0)
        """A reason, and the time until which it counts."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def trouble(self) -> str:
        """Why no job can be carried out at the moment; empty where that is not so."""
        reason, until = self._trouble
        return reason if time.monotonic() < until else ""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the running jobs at their next step, and gives them back."""
        self._is_stopped.set()
        self._workers.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._workers.close()
        try:
            if not self._has_failed:
                self._happened += self._workers.wait(0.0)
            self._handle_happened()
        except LedgerError as error:  # the next server finds the jobs, and does them again
            logger.error("the last outcomes are not recorded: %s", error)

    def cancel_job(self, id_: str) -> None:
        self._workers.cancel_job(id_)

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            try:
                self._take_turn()
            except LedgerError as error:  # of a full disk, or of another process: both may pass
                self.note_ledger_error(error)
                self._is_stopped.wait(_RETRY_SECONDS)
            except BaseException as error:
                logger.exception("the scheduler ended")
                self._has_failed = True
                self._on_failure(error)
                return

    def _take_turn(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at > _RENEW_SECONDS:
            self._ledger.renew()
            self._renewed_at = now
        if now - self._compared_at > _COMPARE_SECONDS:
            self._compared_at = now
            self._withdraw()
        if now >= self._paused_until:
            self._give()
        self._happened += self._workers.wait(_IDLE_SECONDS)
        self._handle_happened()

    def _withdraw(self) -> None:
        """Ends the work on jobs that another server of the directory cancelled, or took over."""
        gone = self._at_work - self._ledger.held_jobs() - self._withdrawn if self._at_work else set[str]()
        for id_ in gone:
            self._workers.cancel_job(id_)
        self._withdrawn |= gone

    def note_ledger_error(self, error: LedgerError) -> None:
        """Of this thread, or of one that answers a request."""
        self._note_trouble(f"the ledger cannot be used: {error.reason}", str(error), 3 * _RETRY_SECONDS)

    def _note_trouble(self, reason: str, logged: str, seconds: float) -> None:
        """`reason`: for clients, and strangers, who learn no paths. `logged`: for the operator."""
        if reason != self._trouble[0] or not self.trouble:
            logger.error("no job is carried out for now: %s", logged)
        self._trouble = (reason, time.monotonic() + seconds)

    def _give(self) -> None:
        while (wanted := self._workers.capacity(max(1, self._ledger.waiting_count()))) > 0:
            if self._waiting_first is not None:
                jobs, self._waiting_first = [self._waiting_first], None
            else:
                model_key, shape_key = self._prefer()
                jobs = self._ledger.lease_fairly(wanted, model_key=model_key, shape_key=shape_key)
                self._at_work.update(job.id for job in jobs)
            if not jobs:
                return
            self._on_given(jobs)
            worker, model_key = self._workers.give(jobs), jobs[0].request.model_key
            if self._loaded.get(worker) != model_key:
                self._loaded[worker], self._loaded_at[model_key] = model_key, time.monotonic()
            self._ledger.start([job.id for job in jobs], worker)

    def _prefer(self) -> tuple[str | None, str | None]:
        """The model, if the next free worker is to stay with its own, and the shape of the jobs for it."""
        model_key, shape_key = self._workers.preference()
        is_new = model_key is not None and time.monotonic() - self._loaded_at.get(model_key, 0.0) < _MODEL_SECONDS
        return model_key if is_new else None, shape_key

    def _handle_happened(self) -> None:
        while self._happened:
            happened = self._happened[0]
            if isinstance(happened, Event):
                self._happened.popleft()
                self._on_event(happened)
                continue
            outcome, state = self._record(happened)
            # Only now: what the ledger did not take is told to it again. And not after the next line: told twice, it
            # would say that the job is not this server's any more.
            self._happened.popleft()
            self._at_work.discard(outcome.id)
            self._withdrawn.discard(outcome.id)
            if outcome.stops_batch:
                self._note_trouble("the disk is full", outcome.error, 2 * _DISK_SECONDS)
                self._paused_until = time.monotonic() + _DISK_SECONDS
            self._on_outcome(outcome, state)

    def _record(self, outcome: Outcome) -> tuple[Outcome, str]:
        """The outcome, and the job's state after it: "returned" of one that is to be done, or is done by another
        server."""
        if outcome.state == "done":
            try:
                for name, content in outcome.contents:
                    self._folder.receive(name, content)
            except (ComfyTpuError, OSError) as error:
                outcome = outcome_of_error(outcome.id, error)
        outcome = dataclasses.replace(outcome, seconds={**outcome.seconds, **self._measure(outcome.id)})
        if outcome.state == "done" and self._ledger.finish(outcome.id, outcome.outputs, outcome.seconds):
            return outcome, "done"
        if outcome.state == "failed":
            state = self._ledger.fail(outcome.id, outcome.error, is_final=outcome.is_final)
            if state is not None:
                return outcome, state
        if outcome.state == "returned":
            self._ledger.give_back([outcome.id], lost=outcome.is_lost)
            if outcome.id == self._first.id:
                self._waiting_first = self._first
        found = self._ledger.find(outcome.id)
        return outcome, "returned" if found is not None and found.state != "cancelled" else "cancelled"
