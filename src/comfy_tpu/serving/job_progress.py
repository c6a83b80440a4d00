"""How far a job is, from the events of its worker."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_tpu.jobs.outcome import Event
    from comfy_tpu.pipeline.progress import Progress


@dataclasses.dataclass(frozen=True)
class JobProgress:
    stage: str = "queued"
    preview: bytes = b""
    """The latest, a JPEG file; empty: none yet."""
    report: Progress | None = None
    """As the pipeline made it."""
    passes: int = 1
    """Two with a second pass at a larger size."""
    done: int = 0
    total: int = 0
    """Steps of the current pass."""
    finished_passes: int = 0

    @property
    def percent(self) -> int:
        """Of the steps: what comes before and after them is short."""
        steps = self.finished_passes * self.total + self.done
        return 100 * steps // (self.passes * self.total) if self.total else 0

    def follow(self, event: Event, preview: bytes = b"") -> JobProgress:
        """The progress after an event. `preview`: the event's, of this job."""
        after = dataclasses.replace(self, stage=event.stage, preview=preview or self.preview, report=event.progress)
        if event.stage != "denoising":
            return after
        finished = self.finished_passes
        if event.done < self.done:  # the next pass, or the job began again
            finished = finished + 1 if finished + 1 < self.passes else 0
        return dataclasses.replace(after, done=event.done, total=event.total, finished_passes=finished)
