"""Functions of models that make a video from a prompt alone, or from a first frame that is kept unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comfy_tpu.config import GenerationSettings


def condition(
    frames: Sequence[torch.Tensor], image_count: int, settings: GenerationSettings
) -> dict[str, torch.Tensor]:
    """`ImageEncoding.condition`: the image's latents."""
    return {"condition": frames[0]}


def replace_first_frame(latents: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return torch.cat((first.to(latents.dtype), latents[:, :, 1:]), dim=2)


def finish(latents: torch.Tensor, embeddings: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`ImageEncoding.finish`: replaces the first latent frame by the image's own."""
    first = embeddings["condition"]
    return replace_first_frame(latents, first.expand(latents.shape[0], *first.shape[1:]))
