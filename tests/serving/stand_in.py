"""A server whose worker writes the prompt where a video would be, and waits where the prompt says so."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.outcome import Outcome, outcome_of_error
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.worker_thread import WorkerThread
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.serving.api import make_app
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.service import Service, open_served_model


class Executor:
    def __init__(self, folder: Folder, on_outcome: Any, on_progress: Any) -> None:
        self._folder, self._on_outcome, self._on_progress = folder, on_outcome, on_progress
        self.current_jobs: tuple[str, ...] = ()
        self.may_go_on = threading.Event()
        self.requests: list[Request] = []

    def run(self, jobs: Any) -> None:
        for job in jobs:
            self.current_jobs = (job.id,)
            self.requests.append(job.request)
            try:
                self._on_outcome(self._carry_out(job))
            except Exception as error:  # noqa: BLE001 - as in the real one
                self._on_outcome(outcome_of_error(job.id, error))

    def _carry_out(self, job: Any) -> Outcome:
        prompt = job.request.prompt
        self._on_progress(Progress("denoising", "", 1, 4))
        while prompt == "wait" and not self.may_go_on.wait(0.01):
            self._on_progress(Progress("denoising", "", 1, 4))
        if prompt == "fail":
            raise ValueError("no such luck")
        with self._folder.writing() as directory:
            names = [
                job.output,
                *(f"{job.output}.{more}" for more in range(1, job.request.values.get("num_videos", 1))),
            ]
            for name in names:
                (directory / name).write_text(prompt)
            return Outcome(job.id, "done", tuple(self._folder.place(directory, names)), seconds={"total": 1.0})

    def close(self) -> None:
        pass


@contextlib.contextmanager
def running(directory: Path, model: str = "demo", **options: Any) -> Iterator[tuple[TestClient, Service, Executor]]:
    executors: list[Executor] = []

    def make_workers(folder: Folder) -> WorkerThread:
        def make(on_outcome: Any, on_progress: Any) -> Executor:
            executors.append(Executor(folder, on_outcome, on_progress))
            return executors[0]

        return WorkerThread("stand-in", 1, make)

    config = ServeConfig((model,), directory, **options)
    service = Service(config, {model: open_served_model(model)}, make_workers)
    service.start()
    try:
        with TestClient(make_app(service)) as client:
            yield client, service, executors[0]
    finally:
        service.close()
