"""Videos that are made segment by segment: each begins with the last frames of the one before.

What is the same for all of them is here. `continuation` is for models that begin with an image, `media_segments` for
those that read given videos, each segment its own part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.context import window_settings
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.progress import Progress, ProgressCallback
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint


class Stages(Protocol):
    """The stages of a pipeline, for videos of one segment."""

    @property
    def on_progress(self) -> ProgressCallback: ...

    @on_progress.setter
    def on_progress(self, callback: ProgressCallback) -> None: ...

    def denoise_segment(
        self,
        embeddings: PromptEmbeddings,
        settings: GenerationSettings,
        seeds: Sequence[int],
        checkpoint: StepCheckpoint | None,
    ) -> torch.Tensor: ...

    def decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterable[torch.Tensor]: ...

    def decode_segment(
        self, latents: torch.Tensor, settings: GenerationSettings, before: int, total: int
    ) -> Iterable[torch.Tensor]: ...

    def part_count(self, latent_frames: int) -> int: ...


ReadSegment = Callable[[int, torch.Tensor | None], PromptEmbeddings]
"""(number of a segment, the last frames of the one before [videos, frames, height, width, 3] in 0..1, or None) -> what
the segment is made from."""


def denoise_segments(
    stages: Stages,
    card: ModelCard,
    settings: GenerationSettings,
    seeds: Sequence[int],
    read: ReadSegment,
    checkpoint: StepCheckpoint | None = None,
) -> list[torch.Tensor]:
    """The latents of each segment; those that `checkpoint` has are not made again. Segment k has the noise of seed + k.
    All but the last segment are decoded, too, for the frames that the next one begins with. All have the same length:
    one program computes them."""
    own, count = window_settings(settings), card.segment_count(settings)
    made: list[torch.Tensor] = [] if checkpoint is None else list(checkpoint.segments)
    previous: torch.Tensor | None = None
    with _SegmentProgress(stages, count) as progress:
        for number in range(len(made), count):
            if number:
                before = dataclasses.replace(own, seed=_later_seed(settings.seed, number - 1))
                previous = _last_frames(stages.decode(made[-1], before), card.segment_overlap(settings))
            progress.segment = number
            segment = dataclasses.replace(own, seed=_later_seed(settings.seed, number))
            later_seeds = [_later_seed(seed, number) for seed in seeds]
            made.append(stages.denoise_segment(read(number, previous), segment, later_seeds, checkpoint))
            if checkpoint is not None:
                checkpoint.finish_segment(made[-1])
    return made


def _last_frames(parts: Iterable[torch.Tensor], count: int) -> torch.Tensor:
    """[videos, count, height, width, 3]."""
    kept: torch.Tensor | None = None
    for part in parts:
        kept = part if kept is None else torch.cat((kept, part), dim=1)
        kept = kept[:, -count:]
    assert kept is not None
    return kept


def _later_seed(seed: int, number: int) -> int:
    return (seed + number) % 2**64


class _SegmentProgress:
    """Reports the steps of all segments as those of one run. What is decoded and encoded between them is no progress,
    and only a chance to cancel."""

    def __init__(self, stages: Stages, count: int) -> None:
        self.segment = 0
        self._stages, self._count = stages, count
        self._report = stages.on_progress
        self._last: Progress | None = None

    def __enter__(self) -> _SegmentProgress:
        self._stages.on_progress = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stages.on_progress = self._report

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "denoising":
            done = self.segment * progress.total + progress.done
            progress = dataclasses.replace(progress, done=done, total=self._count * progress.total)
            self._last = dataclasses.replace(progress, preview=None, reused=False)
        elif progress.stage in ("encoding", "decoding") and self._last is not None:
            progress = self._last
        self._report(progress)
