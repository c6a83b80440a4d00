"""Of models that make a video from a prompt alone, or go on from a first frame that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comfy_tpu.config import GenerationSettings


def condition(frames: Sequence[torch.Tensor], pictures: int, settings: GenerationSettings) -> dict[str, torch.Tensor]:
    """For `ImageInput`: the image's latents."""
    return {"condition": frames[0]}


def with_first(latents: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return torch.cat((first.to(latents.dtype), latents[:, :, 1:]), dim=2)


def finish(latents: torch.Tensor, embeddings: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For `ImageInput`: the first frame is the image's own, whatever the model said about it."""
    first = embeddings["condition"]
    return with_first(latents, first.expand(latents.shape[0], *first.shape[1:]))
