"""Videos that are continued: segments of the model's own length, each from the last frame of the one before.

Latents of all segments are one tensor, as of any video of that length: of a later segment, the latent of its first
frame is left out, because that frame is the last one of the segment before. Decoding encodes that frame again, so that
a segment is decoded as it was made: as a video that begins with an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.context import segment_count, window_settings
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.images import as_image
from comfy_tpu.pipeline.progress import Progress, ProgressCallback


class Stages(Protocol):
    """The stages of a pipeline, for videos of one segment."""

    @property
    def on_progress(self) -> ProgressCallback: ...

    @on_progress.setter
    def on_progress(self, callback: ProgressCallback) -> None: ...

    def denoise(
        self, embeddings: PromptEmbeddings, settings: GenerationSettings, *, seeds: Sequence[int] = ()
    ) -> torch.Tensor: ...

    def decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterable[torch.Tensor]: ...

    def decode_segment(
        self, latents: torch.Tensor, settings: GenerationSettings, before: int, total: int
    ) -> Iterable[torch.Tensor]: ...

    def part_count(self, latent_frames: int) -> int: ...

    def encode_images(self, images: Sequence[Image.Image], settings: GenerationSettings) -> dict[str, torch.Tensor]: ...

    def encode_first_frame(self, image: Image.Image, settings: GenerationSettings) -> torch.Tensor: ...


def denoise_segments(
    stages: Stages,
    card: ModelCard,
    embeddings: PromptEmbeddings,
    settings: GenerationSettings,
    seeds: Sequence[int] = (),
) -> torch.Tensor:
    """The latents of the whole video. `embeddings`: with those of the first image, for one segment. Segment k has the
    noise of seed + k. The last one has the length of the others, and is cut: one program computes all of them."""
    own, count = window_settings(settings), segment_count(settings)
    parts: list[torch.Tensor] = []
    with _SegmentProgress(stages, count) as progress:
        for number in range(count):
            progress.segment = number
            segment = dataclasses.replace(own, seed=_later_seed(settings.seed, number))
            latents = stages.denoise(embeddings, segment, seeds=[_later_seed(seed, number) for seed in seeds])
            parts.append(latents[:, :, 1:] if parts else latents)
            if number + 1 < count:
                frames = _last_frame(stages.decode(latents, segment))
                rows = [stages.encode_images([as_image(frame)], segment) for frame in frames]
                shared = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
                embeddings = dataclasses.replace(embeddings, shared=shared)
    return torch.cat(parts, dim=2)[:, :, : card.latent_frames(settings)].contiguous()


def decode_segments(
    stages: Stages, card: ModelCard, latents: torch.Tensor, settings: GenerationSettings
) -> Iterator[torch.Tensor]:
    """Yields the frames of a continued video as they are decoded."""
    own = window_settings(settings)
    length = card.latent_frames(own)
    segments = [latents[:, :, :length], *_split(latents[:, :, length:], length - 1)]
    counts = [stages.part_count(each.shape[2] + (number > 0)) for number, each in enumerate(segments)]
    last = torch.empty(0)
    for number, segment in enumerate(segments):
        is_first = number == 0
        if not is_first:
            given = torch.cat([stages.encode_first_frame(as_image(frame), own) for frame in last])
            segment = torch.cat((given, segment), dim=2)
        frames = dataclasses.replace(own, num_frames=(segment.shape[2] - 1) * card.temporal_scale + 1)
        for part in stages.decode_segment(segment, frames, sum(counts[:number]), sum(counts)):
            last = part[:, -1]
            # The first frame of a later segment was shown as the last of the one before.
            shown, is_first = part if is_first else part[:, 1:], True
            if shown.shape[1]:
                yield shown


def _split(latents: torch.Tensor, length: int) -> list[torch.Tensor]:
    return list(latents.split(length, dim=2)) if latents.shape[2] else []


def _last_frame(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """[videos, height, width, 3]."""
    for part in parts:
        last = part[:, -1]
    return last


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
