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
