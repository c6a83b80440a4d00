"""Videos of models that read given videos segment by segment (`families.model_family.SegmentEncoding`).

Latents of all segments are one tensor, whole segments one behind the other: a segment begins with frames of the one
before, and they are decoded twice and shown once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.context import window_settings
from comfy_tpu.pipeline import segments
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.media_encoding import encode_clips
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint


class Stages(segments.Stages, Protocol):
    """The stages of a pipeline whose segments read parts of given videos."""

    @property
    def running(self) -> RunningModel: ...


def encode_segment(
    running: RunningModel,
    embeddings: PromptEmbeddings,
    number: int,
    previous: torch.Tensor | None,
    settings: GenerationSettings,
) -> PromptEmbeddings:
    """The embeddings of one segment, from those of the whole video. `previous`: the last frames of the segment before,
    [videos, frames, height, width, 3] in 0..1; None for the first."""
    assert running.family.media is not None
    encoding = running.family.media.segments
    assert encoding is not None
    pixels = None if previous is None else previous.permute(0, 4, 1, 2, 3) * 2 - 1
    latents = encode_clips(running, encoding.clips(embeddings.shared, number, pixels, settings))
    shared = encoding.condition(latents, embeddings.shared, number, settings)
    return dataclasses.replace(embeddings, shared=shared)


def denoise_media_segments(
    stages: Stages,
    card: ModelCard,
    embeddings: PromptEmbeddings,
    settings: GenerationSettings,
    seeds: Sequence[int] = (),
    checkpoint: StepCheckpoint | None = None,
) -> torch.Tensor:
    """The latents of all segments. `embeddings`: with those of the whole given videos."""

    def read(number: int, previous: torch.Tensor | None) -> PromptEmbeddings:
        return encode_segment(stages.running, embeddings, number, previous, settings)

    return torch.cat(segments.denoise_segments(stages, card, settings, seeds, read, checkpoint), dim=2)


def decode_media_segments(
    stages: Stages, card: ModelCard, latents: torch.Tensor, settings: GenerationSettings
) -> Iterator[torch.Tensor]:
    """Yields the frames of a video from the latents of its segments, each frame once."""
    own, count, left = window_settings(settings), card.segment_count(settings), settings.num_frames
    parts = stages.part_count(card.latent_frames(own))
    for number, segment in enumerate(latents.chunk(count, dim=2)):
        known = card.segment_overlap(settings) if number else 0
        for part in stages.decode_segment(segment, own, number * parts, count * parts):
            skipped = min(known, part.shape[1])
            known -= skipped
            frames = part[:, skipped : skipped + left]
            left -= frames.shape[1]
            if frames.shape[1]:
                yield frames
