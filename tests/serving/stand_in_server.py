"""`comfy-tpu serve` with workers that have no model, started again and again by a process that has imported everything.

A line of standard input is a command line, whose process id is answered, or "wait ID".
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import comfy_tpu.serving.api
import comfy_tpu.serving.connections
import comfy_tpu.serving.tracing  # noqa: F401 - as the line above: before the forks
from comfy_tpu.cli import main, ray_options
from comfy_tpu.jobs import local_worker
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import Outcome, outcome_of_error
from comfy_tpu.jobs.worker_thread import WorkerThread
from comfy_tpu.pipeline import atomic
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.serving import planner


class Executor:
    """Takes some time for a job, some more to write its file, and fails where the prompt says so."""

    current_jobs: tuple[str, ...] = ()

    def __init__(self, folder: Folder, on_outcome: Any, on_progress: Any) -> None:
        self._folder, self._on_outcome, self._on_progress = folder, on_outcome, on_progress
        self._random = random.Random(os.getpid())

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.current_jobs = (job.id,)
            try:
                self._on_outcome(self._carry_out(job))
            except Exception as error:  # noqa: BLE001 - as in the real one
                self._on_outcome(outcome_of_error(job.id, error))

    def _carry_out(self, job: Job) -> Outcome:
        for step in range(2):
            time.sleep(self._random.uniform(0, 0.02))
            self._on_progress(Progress("denoising", "", step + 1, 2))
        if job.request.prompt == "fail":
            raise ValueError("no such luck")
        with self._folder.writing() as directory:
            path = directory / job.output
            with atomic.replacing(path) as partial, partial.open("w") as file:
                file.write(job.request.prompt)
                file.flush()
                time.sleep(self._random.uniform(0, 0.01))
                file.write(f" {job.id}")
            return Outcome(job.id, "done", tuple(self._folder.place(directory, [job.output])), seconds={"total": 0.05})

    def render_previews(self, fetch: Any, wanted: Any) -> tuple[bytes, ...]:
        return ()

    def close(self) -> None:
        pass


class StandInWorker(WorkerThread):
    def __init__(self, folder: Folder, **_: Any) -> None:
        super().__init__("stand-in", 2, lambda outcome, progress: Executor(folder, outcome, progress))


class UnknownCosts:
    def __init__(self, common: Any) -> None:
        pass

    def cost(self, model: str, settings: Any) -> None:
        return None


def replace_workers() -> None:
    local_worker.LocalWorker = StandInWorker  # type: ignore[assignment, misc]
    planner.DevicePlanner = UnknownCosts  # type: ignore[assignment, misc]
    ray_options.RAY_DEFAULTS = dataclasses.replace(ray_options.RAY_DEFAULTS, worker_module="ray_stand_in")


def serve_commands() -> None:
    ModelFiles.open("demo")
    for line in sys.stdin:
        words = line.split()
        if words[0] == "wait":
            os.waitpid(int(words[1]), 0)
            print("ended", flush=True)  # noqa: T201
            continue
        process = os.fork()
        if process == 0:
            status = 1
            try:
                status = main.main(words)
            finally:
                os._exit(status)
        print(process, flush=True)  # noqa: T201


if __name__ == "__main__":
    replace_workers()
    if len(sys.argv) > 1:
        sys.exit(main.main(sys.argv[1:]))
    serve_commands()
