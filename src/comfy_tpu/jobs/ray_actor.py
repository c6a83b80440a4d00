"""A worker in a process of Ray: what runs there, and the plain data that it and the driver exchange.

The driver imports this module, too: torch and jax come with the module that carries out jobs, in the actor only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import comfy_tpu
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job, OutputFile
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.worker_thread import ROWS_MAX, WorkerThread

WORKER_MODULE = "comfy_tpu.jobs.local_worker"
"""Has `Executor`, `SavedSteps`, `find_model_facts` and, for several hosts, `join_hosts`."""

_GATHER_SECONDS = 0.05
"""For which a report waits for more: short jobs are told together. A worker has its next group meanwhile."""
_FETCH_SECONDS = 10.0
"""In which a driver fetches the last outcomes of an actor that ends. A preempted machine has 30 s in all."""

STALE_VARIABLES = ("MEGASCALE_", "TPU_PROCESS_", "TPU_CHIPS_PER_PROCESS_", "CLOUD_TPU_TASK_ID")
"""Beginnings of the names of variables by which libtpu divides hosts and slices among processes. An actor has whole
hosts: what another program left here would make it wait for processes that do not exist."""


@dataclasses.dataclass(frozen=True)
class ActorSetup:
    name: str
    folder: str
    """The address of the batch's directory."""
    batch_size: int | None
    worker_module: str = WORKER_MODULE
    scratch: str | None = None
    """A directory for temporary files, which the driver removes; None: the machine's."""
    makes_previews: bool = False
    """Of the jobs that the driver says are watched."""
    checkpoint_every: int | None = None
    """Steps between two saves of a job's steps, in the batch's directory, which this machine reaches then; None: they
    are not saved."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """Where an actor is."""

    node_id: str
    host: str
    process: int
    version: str
    """Of comfy-tpu."""


@dataclasses.dataclass(frozen=True)
class HostsPlace:
    """The place of an actor among those that run one model together."""

    coordinator: str
    """HOST:PORT of the first; the next port is used too."""
    num_processes: int
    process_id: int


@dataclasses.dataclass(frozen=True)
class Report:
    happened: tuple[Outcome | Event, ...]
    is_ending: bool
    """Whether the process was told to end, and takes no more jobs."""


@dataclasses.dataclass(frozen=True)
class ModelRefusal:
    """Why a model cannot be opened."""

    text: str
    field: str | None
    is_invalid: bool
    """Whether the request is wrong, and not the machine."""


class ReturnedFolder(Folder):
    """A local directory of the driver, seen from an actor: files are written elsewhere, and their contents returned."""

    def __init__(self) -> None:
        super().__init__(tempfile.gettempdir())
        self._contents: dict[str, bytes] = {}

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="comfy-tpu-") as directory:
            yield Path(directory)

    def place(self, directory: Path, names: Iterable[str]) -> list[OutputFile]:
        placed = super().place(directory, names)
        self._contents |= {file.name: (directory / file.name).read_bytes() for file in placed}
        return placed

    def take(self, outputs: Iterable[OutputFile]) -> tuple[tuple[str, bytes], ...]:
        """The contents of placed files, which are forgotten here."""
        return tuple((file.name, self._contents.pop(file.name)) for file in outputs)


class JobActor:
    """One worker: `give` jobs, and ask for what `happened`."""

    def __init__(self, setup: ActorSetup) -> None:
        for name in [name for name in os.environ if name.startswith(STALE_VARIABLES)]:
            del os.environ[name]
        if setup.scratch is not None:
            tempfile.tempdir = setup.scratch
        self._setup = setup
        self._folder = ReturnedFolder() if Folder(setup.folder).local is not None else Folder(setup.folder)
        self._thread: WorkerThread | None = None
        self._previews = PreviewRate() if setup.makes_previews else None
        self._lock = threading.Lock()
        self._is_first = True
        """Of the hosts that run one model: all compute the same, and the others' files are dropped."""
        self._failure = ""
        """Why jobs cannot be taken."""
        self._is_started = threading.Event()
        """Whether there is something to report: the thread is there, or will not be."""
        self._is_ending = threading.Event()
        self._is_joined = threading.Event()
        self._is_fetched = threading.Event()
        # Ray makes actors in the main thread, and has it handle signals every 10 ms.
        signal.signal(signal.SIGTERM, self._on_termination)

    def hello(self) -> Hello:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Hello(node, socket.gethostname(), os.getpid(), comfy_tpu.__version__)

    def find_model_facts(self, request: Request) -> ModelFacts | ModelRefusal:
        try:
            facts: ModelFacts = self._module().find_model_facts(request)
        except ComfyTpuError as error:
            return ModelRefusal(str(error), error.field, isinstance(error, InvalidValueError))
        return facts

    def find_coordinator(self) -> str:
        """An address of this machine, of two ports that are free."""
        import ray

        host = ray.util.get_node_ip_address()
        while True:
            with socket.socket() as first, socket.socket() as second:
                first.bind((host, 0))
                port = first.getsockname()[1]
                with contextlib.suppress(OSError, OverflowError):
                    second.bind((host, port + 1))
                    return f"{host}:{port}"

    def join_hosts(self, place: HostsPlace) -> None:
        """Connects this process with those of the other hosts, of which the first reports. Before anything else."""
        self._module().join_hosts(place)
        self._is_first = place.process_id == 0
        if not self._is_first:
            self._folder = ReturnedFolder()

    def give(self, jobs: list[Job]) -> None:
        with self._lock:
            try:
                if self._thread is None:
                    self._thread = self._start()
                self._thread.give(jobs)
            except Exception as error:  # noqa: BLE001 - `happened` raises it, where the driver listens
                self._failure = f"{type(error).__name__}: {error}"
        self._is_started.set()

    def cancel_job(self, id_: str) -> None:
        """As `WorkerThread.cancel_job`."""
        with self._lock:
            if self._thread is not None:
                self._thread.cancel_job(id_)

    def happened(self, timeout: float, watched: tuple[str, ...] = ()) -> Report:
        """Outcomes and the last event of each group of jobs, as soon as there is one; none after `timeout` seconds.
        `watched`: jobs whose previews somebody wants."""
        if self._previews is not None:
            self._previews.watch(watched)
        end = time.monotonic() + timeout
        self._is_started.wait(timeout)
        if self._failure:
            raise RuntimeError(self._failure)
        is_over = self._is_joined.is_set()  # before the queue is read: what is found then is everything
        items: list[Outcome | Event] = []
        if self._thread is not None:
            items = self._thread.wait(0.0 if is_over else max(0.0, end - time.monotonic()))
            if items and not is_over:
                time.sleep(_GATHER_SECONDS)
                items += self._thread.wait(0.0)
        if is_over:
            self._is_fetched.set()
        outcomes = [self._with_contents(item) for item in items if isinstance(item, Outcome)]
        events: dict[tuple[str, ...], Event] = {}
        for item in items:
            if isinstance(item, Event):
                before = events.get(item.jobs)
                previews = item.previews or (before.previews if before is not None else ())
                events[item.jobs] = dataclasses.replace(item, previews=previews)
        return Report((*events.values(), *outcomes) if self._is_first else (), is_over)

    def _module(self) -> Any:
        return importlib.import_module(self._setup.worker_module)

    def _start(self) -> WorkerThread:
        executor, size = self._module().Executor, self._setup.batch_size
        options: dict[str, Any] = {"learns_colours": True} if self._previews is not None else {}
        if (every := self._setup.checkpoint_every) is not None:
            options["saved_steps"] = self._module().SavedSteps(Folder(self._setup.folder), every)
        return WorkerThread(
            self._setup.name,
            ROWS_MAX if size is None else size,
            lambda on_outcome, on_progress: executor(
                self._folder, batch_size=size, on_outcome=on_outcome, on_progress=on_progress, **options
            ),
            self._previews,
        )

    def _with_contents(self, outcome: Outcome) -> Outcome:
        if outcome.state != "done" or not isinstance(self._folder, ReturnedFolder):
            return outcome
        return dataclasses.replace(outcome, contents=self._folder.take(outcome.outputs))

    def _on_termination(self, number: int, frame: object) -> None:
        if not self._is_ending.is_set():
            self._is_ending.set()
            threading.Thread(target=self._end, name="ending", daemon=True).start()

    def _end(self) -> None:
        """Finishes the step that runs, has the driver fetch the outcomes, and ends the process."""
        with self._lock:
            if self._thread is not None:
                self._thread.cancel()
                self._thread.close()
            self._is_joined.set()
        self._is_started.set()
        self._is_fetched.wait(_FETCH_SECONDS)
        time.sleep(1.0)  # until the last reply is sent
        os._exit(0)
