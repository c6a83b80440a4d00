"""The worker of this process: a thread that carries jobs out, beside the driver's."""

from __future__ import annotations

import contextlib
import queue
import threading

from comfy_tpu.jobs.batch_size import ROWS_MAX
from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.execution import Executor
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.opening import choose_model
from comfy_tpu.jobs.outcome import CancelledError, Event, Outcome
from comfy_tpu.jobs.request import DEFAULT_MODEL, Request
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.single_files import open_model

NAME = "local"
_GROUPS_AHEAD = 2
"""Groups that are leased: one that runs, and the next, so that the devices do not wait for the ledger."""


class LocalWorker:
    def __init__(self, folder: Folder, *, batch_size: int | None = None, name: str = NAME) -> None:
        """`batch_size`: the most prompts that share a step; None: as many as there is room for."""
        self._name = name
        self._group_size = ROWS_MAX if batch_size is None else batch_size
        self._groups: queue.Queue[list[Job] | None] = queue.Queue()
        self._happened: queue.Queue[Outcome | Event] = queue.Queue()
        self._last: Request | None = None
        self._open = 0
        """Groups that were given and are not carried out."""
        self._is_cancelled = threading.Event()
        self._failure: BaseException | None = None
        self._executor = Executor(
            folder, batch_size=batch_size, on_outcome=self._happened.put, on_progress=self._on_progress
        )
        self._thread = threading.Thread(target=self._run, name="jobs")
        self._thread.start()

    def capacity(self) -> int:
        return self._group_size if self._open < _GROUPS_AHEAD and not self._is_cancelled.is_set() else 0

    def preference(self) -> tuple[str | None, str | None]:
        return (None, None) if self._last is None else (self._last.model_key, self._last.shape_key)

    def give(self, jobs: list[Job]) -> str:
        self._open += 1
        self._last = jobs[0].request
        self._groups.put(jobs)
        return self._name

    def wait(self, timeout: float) -> list[Outcome | Event]:
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(queue.Empty):
            happened = [self._happened.get(timeout=timeout)]
            with contextlib.suppress(queue.Empty):
                while True:
                    happened.append(self._happened.get_nowait())
            return happened
        return []

    def cancel(self) -> None:
        """At the end of the step that is running."""
        self._is_cancelled.set()

    def close(self) -> None:
        """Waits for the jobs that were given, or for the step that is running where they were cancelled."""
        self._groups.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (jobs := self._groups.get()) is not None:
                if not self._is_cancelled.is_set():
                    self._executor.run(jobs)
                self._open -= 1
        except BaseException as error:  # noqa: BLE001 - the driver's thread raises it
            self._failure = error
        finally:
            self._executor.close()

    def _on_progress(self, progress: Progress) -> None:
        if self._is_cancelled.is_set():
            raise CancelledError
        self._happened.put(Event(self._name, progress.stage, progress.label, progress.done, progress.total))


def find_model_facts(request: Request) -> ModelFacts:
    """Opens the model's files, and downloads them if needed."""
    model = choose_model(request.values)
    files = open_model(DEFAULT_MODEL if model is None else model)
    return ModelFacts(files.fingerprint, files.family.card.limits.frames_max == 1)
