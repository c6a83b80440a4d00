"""Latents of another size: frames are resized, and a sound stays as it is. Needs no jax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.shared.packed_sound import join_sound, split_sound

_FILTERS = {"latent": "bicubic", "latent-bilinear": "bilinear", "latent-nearest": "nearest-exact"}


def resize_latents(
    card: ModelCard, latents: torch.Tensor, made: GenerationSettings, wanted: GenerationSettings, by: str = "latent"
) -> torch.Tensor:
    """Latents of the size of `wanted`, from those that were made with `made`."""
    frames = latents[:, :, : card.latent_frames(made)]
    return keep_sound(card, resize_frames(frames, card.latent_size(wanted)[1:], by), latents, made)


def resize_frames(frames: torch.Tensor, size: tuple[int, ...], by: str) -> torch.Tensor:
    """[videos, channels, frames, height, width], frame by frame, as ComfyUI's Upscale Latent does."""
    mode = _FILTERS[by]
    options: dict[str, Any] = {} if mode == "nearest-exact" else {"align_corners": False}
    flat = frames.float().movedim(2, 1).flatten(0, 1)
    resized = F.interpolate(flat, size=size, mode=mode, **options)
    return resized.unflatten(0, (len(frames), -1)).movedim(1, 2).contiguous()


def keep_sound(card: ModelCard, frames: torch.Tensor, latents: torch.Tensor, made: GenerationSettings) -> torch.Tensor:
    """Resized frames with the sound of the latents, which were made with `made`; as they are where there is none."""
    if card.sound is None:
        return frames
    _, sound = split_sound(latents, card.latent_frames(made), card.sound_tokens(made))
    return join_sound(frames, sound.to(frames.dtype))
