"""Videos that are continued: segments of the model's own length, each from the last frame of the one before.

Latents of all segments are one tensor, as of any video of that length: of a later segment, the latent of its first
frame is left out, because that frame is the last one of the segment before. Decoding encodes that frame again, so that
a segment is decoded as it was made: as a video that begins with an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.context import window_settings
from comfy_tpu.pipeline import segments
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.images import as_image
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint


class Stages(segments.Stages, Protocol):
    """The stages of a pipeline whose videos begin with an image."""

    def encode_media(self, given: Sequence[Image.Image], settings: GenerationSettings) -> dict[str, torch.Tensor]: ...

    def encode_first_frame(self, image: Image.Image, settings: GenerationSettings) -> torch.Tensor: ...


def denoise_continued(
    stages: Stages,
    card: ModelCard,
    embeddings: PromptEmbeddings,
    settings: GenerationSettings,
    seeds: Sequence[int] = (),
    checkpoint: StepCheckpoint | None = None,
) -> torch.Tensor:
    """The latents of the whole video. `embeddings`: with those of the first image, for one segment. The last segment
    has the length of the others, and is cut."""
    own = window_settings(settings)

    def read(number: int, previous: torch.Tensor | None) -> PromptEmbeddings:
        if previous is None:
            return embeddings
        rows = [stages.encode_media([as_image(frame)], own) for frame in previous[:, -1]]
        shared = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return dataclasses.replace(embeddings, shared=shared)

    first, *later = segments.denoise_segments(stages, card, settings, seeds, read, checkpoint)
    joined = torch.cat((first, *(latents[:, :, 1:] for latents in later)), dim=2)
    return joined[:, :, : card.latent_frames(settings)].contiguous()


def decode_continued(
    stages: Stages, card: ModelCard, latents: torch.Tensor, settings: GenerationSettings
) -> Iterator[torch.Tensor]:
    """Yields the frames of a continued video as they are decoded."""
    own = window_settings(settings)
    length = card.latent_frames(own)
    parts = [latents[:, :, :length], *_split(latents[:, :, length:], length - 1)]
    counts = [stages.part_count(each.shape[2] + (number > 0)) for number, each in enumerate(parts)]
    last = torch.empty(0)
    for number, segment in enumerate(parts):
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
