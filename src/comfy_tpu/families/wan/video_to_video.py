"""Wan from a video: denoising starts from its latents with noise added to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import Clips, FittedMedia, video_clip
from comfy_tpu.families.model_family import MediaEncoding
from comfy_tpu.families.wan.vae import TEMPORAL_SCALE


def clips(media: FittedMedia, settings: GenerationSettings, config: Config) -> Clips:
    return {"video": video_clip(media.videos["video"], TEMPORAL_SCALE)}


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    return {"initial": torch.cat(tuple(latents["video"]), dim=2)}


VIDEO_ENCODING = MediaEncoding(clips, condition)
