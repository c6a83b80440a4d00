"""Functions of models that make a video from a prompt alone, or from a first frame that is kept unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import FittedMedia


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    """`MediaEncoding.condition`: the image's latents."""
    return {"condition": latents["video"][0]}


def replace_first_frame(latents: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return torch.cat((first.to(latents.dtype), latents[:, :, 1:]), dim=2)


def finish(latents: torch.Tensor, embeddings: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`MediaEncoding.finish`: replaces the first latent frame by the image's own."""
    first = embeddings["condition"]
    return replace_first_frame(latents, first.expand(latents.shape[0], *first.shape[1:]))


def expand_to_tokens(rows: torch.Tensor, batch: int, frames: int, frame_tokens: int) -> torch.Tensor:
    """One row -> [batch, 1, features]; two rows -> the first for tokens of the first frame, the second for the
    others."""
    if rows.shape[0] == 1:
        return rows.expand(batch, -1).unsqueeze(1)
    is_first = torch.arange(frames * frame_tokens, device=rows.device).unsqueeze(-1) < frame_tokens
    return torch.where(is_first, rows[:1], rows[1:]).unsqueeze(0).expand(batch, -1, -1)
