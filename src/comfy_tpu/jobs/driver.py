"""Drives a batch: submits lines as jobs, leases them to workers, records what becomes of them.

Nothing here imports jax: the workers may be in other processes, on other machines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.folder import Folder, file_fingerprint
from comfy_tpu.jobs.ledger import LEASE_SECONDS, Conflict, Counts, Job, Ledger, NewJob, OutputFile
from comfy_tpu.jobs.outcome import Event, Outcome, outcome_of_error
from comfy_tpu.jobs.output_names import check_output_name, find_steps_job, list_other_names, list_steps_names
from comfy_tpu.jobs.request import Request, default_output
from comfy_tpu.jobs.sources import InvalidLine, Line
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline.path_conflicts import check_conflicts

logger = logging.getLogger(__name__)

_SUBMIT_AT_ONCE = 1000
_RENEW_SECONDS = LEASE_SECONDS / 6
_RESULTS_SECONDS = 300.0
"""How often results.jsonl is written to a remote directory while a batch runs: a machine may go, with its ledger."""
_COUNT_SECONDS, _COUNT_SHARE = 0.2, 0.05
"""Jobs are counted this long after the last time, and in this share of the driver's time at most."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a driver must know of a model."""

    fingerprint: str
    makes_images: bool

    @property
    def suffix(self) -> str:
        return ".png" if self.makes_images else ".mp4"


ParseLine = Callable[[Mapping[str, Any]], Request]
FindModel = Callable[[Request], ModelFacts]


class Workers(Protocol):
    """Where jobs are carried out."""

    def capacity(self, waiting: int) -> int:
        """How many more jobs are wanted now, of so many that wait; 0 while all workers are busy."""
        ...

    def preference(self) -> tuple[str | None, str | None]:
        """The model and the shape of the jobs that are wanted: those that the next free worker has programs for."""
        ...

    def give(self, jobs: list[Job]) -> str:
        """Takes jobs of one shape, and returns the worker's name."""
        ...

    def wait(self, timeout: float) -> list[Outcome | Event]:
        """What happened, as soon as something did."""
        ...

    def cancel(self) -> None:
        """Ends the jobs that are running; they are returned."""
        ...


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A line that was not submitted."""

    line: int
    reason: str


class Observer(Protocol):
    """Shows what happens in a batch."""

    def refused(self, refusal: Refusal) -> None: ...
    def submitted(self, counts: Counts) -> None: ...
    def event(self, event: Event) -> None: ...
    def finished(self, outcome: Outcome, state: str, counts: Counts) -> None: ...


class Batch:
    """The jobs of one directory."""

    def __init__(self, folder: Folder, ledger: Ledger, observer: Observer, *, saves_steps: bool = False) -> None:
        """`saves_steps`: whether the workers save the steps of jobs (saved_steps.py)."""
        self.folder = folder
        self._saves_steps = saves_steps
        self.ledger = ledger
        self._observer = observer
        self._results_at = time.monotonic()
        self.refusals = 0
        self._counts = Counts()
        self._recount_at = 0.0
        self._given: dict[str, Job] = {}
        """The jobs that workers have, by id."""
        self._opened_models: set[str] = set()
        """Those of which a job was done, by `Request.model_key`."""
        self._refused_models: set[str] = set()
        """Those that cannot be opened, which was said."""

    def submit(self, lines: Iterable[Line | InvalidLine], parse: ParseLine, find_model: FindModel) -> None:
        """Submits all lines, some thousand at a time. Those that are done already stay done."""
        existing = self.folder.names()
        numbered = self._make_jobs(lines, parse, find_model)
        while jobs := list(itertools.islice(numbered, _SUBMIT_AT_ONCE)):
            for job, submission in zip(jobs, self.ledger.submit(jobs, existing), strict=True):
                if submission.conflict is not None:
                    self._refuse(Refusal(job.line, _describe_conflict(job, submission.conflict)))
        self._remove_unwanted_steps(existing)
        self._observer.submitted(self._recount(at_once=True))

    def _remove_unwanted_steps(self, existing: set[str]) -> None:
        """Removes saved steps of jobs that are done, or that no line asks for any more. In a remote directory those of
        jobs that this ledger does not know may be another machine's."""
        saved = {name: id_ for name in existing if (id_ := find_steps_job(name)) is not None}
        found = self.ledger.find_open(saved.values())
        self.folder.remove([name for name, id_ in saved.items() if not found.get(id_, self.folder.is_remote)])
        # The others are removed when their jobs are done, also where this run saves none.
        self._saves_steps = self._saves_steps or any(found.values())

    def restore(self) -> None:
        """Finds finished jobs in results.jsonl where the ledger is new: its machine is gone, or it was removed."""
        if self.ledger.run != 1 or self.ledger.counts().total:
            return
        with self.folder.open_results() as lines:
            for line in lines:
                if (found := _read_result(line)) is not None:
                    self.ledger.restore_done(*found)

    def _make_jobs(
        self, lines: Iterable[Line | InvalidLine], parse: ParseLine, find_model: FindModel
    ) -> Iterator[NewJob]:
        for line in lines:
            if isinstance(line, InvalidLine):
                self._refuse(Refusal(line.number, line.reason))
                continue
            try:
                yield self._make_job(line, parse, find_model)
            except InvalidValueError as error:
                self._refuse(Refusal(line.number, str(error)))

    def _make_job(self, line: Line, parse: ParseLine, find_model: FindModel) -> NewJob:
        request = parse(line.values)
        facts = find_model(request)
        identity = request.identity(facts.fingerprint, file_fingerprint)
        output = request.output
        name = default_output(request, identity, facts.suffix) if output is None else check_output_name(output)
        others = list_other_names(name, request.values)
        if self.folder.local is not None:
            outputs = [("output", self.folder.local / each) for each in (name, *others)]
            check_conflicts(outputs, map(Path, request.input_files()))
        return NewJob(_job_id(identity, name), line.number, request, name, others)

    def _refuse(self, refusal: Refusal) -> None:
        self.refusals += 1
        self._observer.refused(refusal)

    def run(self, workers: Workers) -> Counts:
        """Carries out all submitted jobs. Raises ComfyTpuError where no job can succeed."""
        stopped = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(stopped,), name="leases", daemon=True)
        renewal.start()
        try:
            while self._step(workers):
                pass
        except BaseException:
            workers.cancel()
            raise
        finally:
            stopped.set()
            renewal.join()
        return self.ledger.counts()

    def _step(self, workers: Workers) -> bool:
        """Whether there is more to do."""
        idle = True
        waiting = self._recount().submitted
        while (wanted := workers.capacity(waiting)) > 0:
            model_key, shape_key = workers.preference()
            jobs = self.ledger.lease(wanted, model_key=model_key, shape_key=shape_key)
            if not jobs:
                break
            self._given |= {job.id: job for job in jobs}
            self.ledger.start([job.id for job in jobs], workers.give(jobs))
            waiting = max(0, waiting - len(jobs))
            idle = False
        if idle and not self._counts.open and not self._recount(at_once=True).open:
            return False
        for happened in workers.wait(1.0):
            if isinstance(happened, Event):
                self._observer.event(happened)
            else:
                self._record(happened)
        if self.folder.is_remote and time.monotonic() - self._results_at > _RESULTS_SECONDS:
            self.write_results()
        return True

    def _recount(self, *, at_once: bool = False) -> Counts:
        """The counts as they are, or were a moment ago: to count a million jobs takes a while."""
        if at_once or time.monotonic() >= self._recount_at:
            begun = time.monotonic()
            self._counts = self.ledger.counts()
            ended = time.monotonic()
            self._recount_at = ended + max(_COUNT_SECONDS, (ended - begun) / _COUNT_SHARE)
        return self._counts

    def _receive(self, outcome: Outcome) -> Outcome:
        """The outcome, after its files are at their places; that of the error, if they cannot be."""
        try:
            for file, content in outcome.contents:
                self.folder.receive(file, content)
        except (ComfyTpuError, OSError) as error:
            return outcome_of_error(outcome.id, error)
        return outcome

    def _record(self, outcome: Outcome) -> None:
        state = "returned"
        if outcome.state == "done":
            outcome = self._receive(outcome)
        model_key = ""
        if (job := self._given.pop(outcome.id, None)) is not None:
            outcome = dataclasses.replace(outcome, line=job.line, output=job.output)
            model_key = job.request.model_key
        if outcome.state == "done":
            state = "done" if self.ledger.finish(outcome.id, outcome.outputs, outcome.seconds) else "lost"
            self._opened_models.add(model_key)
            if self._saves_steps and job is not None:
                self.folder.remove(list_steps_names(job.id, job.request.values))
        elif outcome.state == "failed":
            state = self.ledger.fail(outcome.id, outcome.error, is_final=outcome.is_final) or "lost"
        else:
            self.ledger.give_back([outcome.id], lost=outcome.is_lost)
        if outcome.is_of_model and model_key in self._opened_models:
            # Another worker has the devices that this one lacks.
            outcome = dataclasses.replace(outcome, is_of_model=False)
        if model_key not in self._refused_models:
            self._observer.finished(outcome, state, self._recount())
        if outcome.is_of_model:
            self._refused_models.add(model_key)
            self.ledger.fail_model(model_key, outcome.error)
        if outcome.stops_batch:
            raise ComfyTpuError(f"{outcome.error}; start the batch again afterwards, and it goes on where it was")

    def _renew(self, stopped: threading.Event) -> None:
        while not stopped.wait(_RENEW_SECONDS):
            try:
                self.ledger.renew()
            except ComfyTpuError as error:  # the next write of the driver itself will say so, too
                logger.warning("%s", error)

    def write_results(self) -> None:
        self._results_at = time.monotonic()
        self.folder.write_results(self.ledger.results())


def _read_result(line: bytes) -> tuple[NewJob, list[OutputFile], dict[str, float]] | None:
    """A finished job of results.jsonl; None for any other line, and for a damaged one."""
    try:
        result = parse_json(line)
        if not isinstance(result, dict) or result.get("state") != "done":
            return None
        job = NewJob(result["id"], result["line"], Request(result["request"]), result["output"])
        outputs, seconds = [OutputFile(**each) for each in result["outputs"]], result["seconds"] or {}
    except (ValueError, KeyError, TypeError):
        return None
    texts = [job.id, job.output, *(text for file in outputs for text in (file.name, file.sha256))]
    numbers = [job.line, *(file.size for file in outputs)]
    is_whole = (
        isinstance(job.request.values, dict)
        and isinstance(job.request.values.get("prompt"), str)
        and isinstance(seconds, dict)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) and abs(number) < 2**63 for number in numbers)  # as SQLite holds them
    )
    return (job, outputs, seconds) if is_whole else None


def _describe_conflict(job: NewJob, conflict: Conflict) -> str:
    if conflict.name == job.output:
        return f"output={job.output} is also that of line {conflict.line}; give another name"
    return f"output={job.output} would write {conflict.name}, as line {conflict.line} does; give another name"


def _job_id(identity: str, output: str) -> str:
    return hashlib.sha256(f"{identity}\0{output}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
