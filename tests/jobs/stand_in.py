"""A worker that writes a small file for each job, or does what the prompt says."""

import hashlib
import os
import signal
from pathlib import Path

from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job, OutputFile
from comfy_tpu.jobs.outcome import Event, Outcome, outcome_of_error
from comfy_tpu.jobs.request import Request

FACTS = ModelFacts("fingerprint", makes_images=True)


def find_model(request: Request) -> ModelFacts:
    return FACTS


def content(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode()).digest()


class StandInWorkers:
    """Carries out a group each time that the driver waits."""

    def __init__(self, folder: Folder, group_size: int = 1) -> None:
        self.folder = folder
        self.groups: list[list[Job]] = []
        self.ran: list[str] = []
        self.is_cancelled = False
        self._group_size = group_size
        self._errors: dict[str, list[Exception]] = {}

    def fail(self, prompt: str, *errors: Exception) -> None:
        """The next attempts at this prompt raise these errors."""
        self._errors[prompt] = list(errors)

    def capacity(self, waiting: int) -> int:
        return self._group_size if len(self.groups) < 2 else 0

    def preference(self) -> tuple[str | None, str | None]:
        last = self.groups[-1][0].request if self.groups else None
        return (None, None) if last is None else (last.model_key, last.shape_key)

    def give(self, jobs: list[Job]) -> str:
        self.groups.append(jobs)
        return "stand-in"

    def wait(self, timeout: float) -> list[Outcome | Event]:
        happened: list[Outcome | Event] = []
        for job in self.groups.pop(0) if self.groups else ():
            prompt = job.request.prompt
            if prompt == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self.ran.append(prompt)
            happened.append(Event("stand-in", "denoising", "", 1, 1))
            try:
                if self._errors.get(prompt):
                    raise self._errors[prompt].pop(0)
                happened.append(Outcome(job.id, "done", tuple(self._write(job)), seconds={"total": 1.0}))
            except Exception as error:  # noqa: BLE001 - a job's error is its outcome
                happened.append(outcome_of_error(job.id, error))
        return happened

    def cancel(self) -> None:
        self.is_cancelled = True

    def _write(self, job: Job) -> list[OutputFile]:
        with self.folder.writing() as directory:
            Path(self.folder.check_inside(directory, job.output)).write_bytes(content(job.request.prompt))
            return self.folder.place(directory, [job.output])
