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
    steps: tuple[int, ...] = (1,)
    """Of each pass: two with a second pass at a larger size. One pass may run others than were foreseen."""
    number: int = 0
    """Of the current pass, from 0."""
    done: int = 0
    total: int = 0
    """Steps of the current pass."""

    @property
    def percent(self) -> int:
        """Of the steps of all passes: what comes before and after them is short."""
        if not self.total:
            return 0
        before, own = sum(self.steps[: self.number]), self.steps[self.number]
        return int(100 * (before + own * self.done / self.total) / sum(self.steps))

    def follow(self, event: Event, preview: bytes = b"") -> JobProgress:
        """The progress after an event. `preview`: the event's, of this job."""
        after = dataclasses.replace(self, stage=event.stage, preview=preview or self.preview, report=event.progress)
        if event.stage != "denoising":
            return after
        return dataclasses.replace(after, number=self._find_pass(event), done=event.done, total=event.total)

    def _find_pass(self, event: Event) -> int:
        """Events may be missing, and a job may begin again: passes of different numbers of steps are told apart by
        these."""
        if len(self.steps) == 1:
            return 0
        first, second = self.steps
        if first != second:
            return int(event.total == second)
        return 1 if event.done < self.done else self.number
