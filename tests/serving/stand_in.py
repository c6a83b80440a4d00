"""A server whose worker writes the prompt where a video would be, and waits where the prompt says so."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fastapi.testclient import TestClient

from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.outcome import Outcome, outcome_of_error
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.worker_thread import WorkerThread
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.serving.api import make_app
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.served_model import open_served_model
from comfy_tpu.serving.service import Service


class Executor:
    def __init__(self, folder: Folder, on_outcome: Any, on_progress: Any) -> None:
        self._folder, self._on_outcome, self._on_progress = folder, on_outcome, on_progress
        self.current_jobs: tuple[str, ...] = ()
        self.may_go_on = threading.Event()
        self.previews_made = 0
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
            self._on_progress(Progress("denoising", "", 1, 4, preview=lambda row=0: torch.empty(0)))
        if prompt == "fail":
            raise ValueError(f"no such luck: {self._folder.address}/weights.safetensors")
        with self._folder.writing() as directory:
            names = [
                job.output,
                *(f"{job.output}.{more}" for more in range(1, job.request.values.get("num_videos", 1))),
            ]
            for name in names:
                (directory / name).write_text(prompt)
            return Outcome(job.id, "done", tuple(self._folder.place(directory, names)), seconds={"total": 1.0})

    def render_previews(self, fetch: Any, wanted: Any) -> tuple[bytes, ...]:
        self.previews_made += 1
        return tuple(b"preview %d" % self.previews_made if id_ in wanted else b"" for id_ in self.current_jobs)

    def close(self) -> None:
        pass


Served = tuple[TestClient, Service]


@contextlib.contextmanager
def running(
    directory: Path,
    model: str = "demo",
    *,
    planner: Any = None,
    tracer: Any = None,
    group_size: int = 1,
    on_failure: Callable[[], None] = lambda: None,
    **options: Any,
) -> Iterator[tuple[TestClient, Service, Executor]]:
    executors: list[Executor] = []
    previews = PreviewRate()

    def make_workers(folder: Folder) -> WorkerThread:
        def make(on_outcome: Any, on_progress: Any) -> Executor:
            executors.append(Executor(folder, on_outcome, on_progress))
            return executors[0]

        return WorkerThread("stand-in", group_size, make, previews)

    config = ServeConfig((model,), directory, **options)
    models = {model: open_served_model(model)}
    service = Service(config, models, make_workers, previews, planner=planner, tracer=tracer)
    service.on_failure = on_failure
    service.start()
    try:
        with TestClient(make_app(service, tracer), base_url="http://127.0.0.1:8000") as client:
            yield client, service, executors[0]
    finally:
        service.close()
