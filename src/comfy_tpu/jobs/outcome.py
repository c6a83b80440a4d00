"""What workers tell a driver: events while a job runs, and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.ledger import OutputFile
from comfy_tpu.pipeline.progress import Progress


@dataclasses.dataclass(frozen=True)
class Event:
    """A step of a worker's work."""

    worker: str
    stage: str
    """As in `pipeline.progress.Progress`."""
    what: str
    done: int
    total: int
    jobs: tuple[str, ...] = ()
    """The ids of the jobs that it is for; none where it is for all that follow, such as loading a model."""
    previews: tuple[bytes, ...] = ()
    """A small JPEG file for each of the jobs, empty for those that nobody watches; none at most steps."""
    progress: Progress | None = None
    """The report as the pipeline made it, without its preview."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    id: str
    state: Literal["done", "failed", "returned"]
    """returned: it was not carried out, and is as good as before."""
    outputs: tuple[OutputFile, ...] = ()
    contents: tuple[tuple[str, bytes], ...] = ()
    """Files that the driver is to write, by name: a worker on another machine does not reach a local directory."""
    error: str = ""
    is_final: bool = False
    """Whether another attempt would fail in the same way."""
    is_lost: bool = False
    """Whether the worker died."""
    is_of_model: bool = False
    """Whether every other job of its model would fail in the same way: the mesh has more devices than there are."""
    stops_batch: bool = False
    """Whether every other job would fail in the same way: the disk is full."""
    cut: str = ""
    """The end of the prompt that exceeded the model's token limit."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    resumed_after: int = 0
    """The steps that an earlier worker had saved."""
    line: int | None = None
    """Of the job file. The driver adds it."""
    output: str = ""
    """The name that the job's output has or would have. The driver adds it."""

    @property
    def job_name(self) -> str:
        """The job as a user knows it."""
        return f"line {self.line} ({self.output})" if self.line else f"job {self.id[:10]}"


class CancelledError(Exception):
    """Raised inside a run to end it."""


def outcome_of_error(id_: str, error: Exception) -> Outcome:
    if isinstance(error, CancelledError):
        return Outcome(id_, "returned")
    text = str(error) if isinstance(error, ComfyTpuError) else f"{type(error).__name__}: {error}"
    is_disk_full = "No space left" in text or "Disk quota" in text
    return Outcome(
        id_,
        "returned" if is_disk_full else "failed",
        error=text,
        is_final=isinstance(error, InvalidValueError),
        stops_batch=is_disk_full,
    )
