"""Videos that are made segment by segment: each segment begins with the last frames of the one before.

A model says what a segment reads (`SegmentEncoding`). The loop here knows nothing else of it, so that any model that
can begin with given frames goes on from the last ones of a segment in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.media_encoding import encode_clips
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.running_model import RunningModel

Denoise = Callable[[PromptEmbeddings, torch.Generator], torch.Tensor]
"""(embeddings of a segment, the noise's generator) -> its latents."""
Decode = Callable[[torch.Tensor], Iterator[torch.Tensor]]
"""(latents of a segment) -> its frames, [videos, t, height, width, 3] in 0..1, as they are decoded."""


def read_segment(
    running: RunningModel,
    embeddings: PromptEmbeddings,
    number: int,
    previous: torch.Tensor | None,
    settings: GenerationSettings,
) -> PromptEmbeddings:
    """The embeddings of one segment. `previous`: the last frames of the one before, [videos, frames, height, width, 3]
    in 0..1; None for the first."""
    assert running.family.media is not None
    segments = running.family.media.segments
    assert segments is not None
    pixels = None if previous is None else previous.permute(0, 4, 1, 2, 3) * 2 - 1
    latents = encode_clips(running, segments.clips(embeddings.shared, number, pixels, settings))
    shared = segments.condition(latents, embeddings.shared, number, settings)
    return dataclasses.replace(embeddings, shared=shared)


def denoise_segments(
    running: RunningModel,
    embeddings: PromptEmbeddings,
    settings: GenerationSettings,
    denoise: Denoise,
    decode: Decode,
) -> torch.Tensor:
    """The latents of all segments, one behind the other. All but the last segment are decoded here, too, since the next
    one begins with their last frames."""
    count = running.family.card.segment_count(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    previous: torch.Tensor | None = None
    made: list[torch.Tensor] = []
    for number in range(count):
        with _counted(running, number, count):
            own = read_segment(running, embeddings, number, previous, settings)
            made.append(denoise(own, generator))
            if number + 1 < count:
                previous = _last_frames(decode(made[-1]), settings.segment_overlap)
    return torch.cat(made, dim=2)


def decode_segments(
    latents: torch.Tensor, settings: GenerationSettings, card: ModelCard, decode: Decode
) -> Iterator[torch.Tensor]:
    """Yields the frames of a video from the latents of its segments, each frame once."""
    left = settings.num_frames
    for number, segment in enumerate(latents.chunk(card.segment_count(settings), dim=2)):
        known = settings.segment_overlap if number else 0
        for part in decode(segment):
            skipped = min(known, part.shape[1])
            known -= skipped
            frames = part[:, skipped : skipped + left]
            left -= frames.shape[1]
            if frames.shape[1]:
                yield frames


def _last_frames(parts: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    kept: torch.Tensor | None = None
    for part in parts:
        kept = part if kept is None else torch.cat((kept, part), dim=1)
        kept = kept[:, -count:]
    assert kept is not None
    return kept


@contextlib.contextmanager
def _counted(running: RunningModel, number: int, count: int) -> Iterator[None]:
    """Reports the steps of a segment as those of the whole video, and its decoding not as the stage of that name."""
    report = running.on_progress

    def report_counted(progress: Progress) -> None:
        if progress.stage == "denoising":
            total = progress.total * count
            report(dataclasses.replace(progress, done=number * progress.total + progress.done, total=total))
        elif progress.stage == "decoding":
            report(dataclasses.replace(progress, stage="encoding", what="image"))
        else:
            report(progress)

    running.on_progress = report_counted
    try:
        yield
    finally:
        running.on_progress = report
