"""Latents that a sampler starts from, in place of noise alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from comfy_tpu.comfy.exchange import check_fps, from_latent
from comfy_tpu.errors import InvalidValueError

if TYPE_CHECKING:
    from comfy_tpu.comfy.run import NodePipeline
    from comfy_tpu.config import GenerationSettings

NAME = "initial_latents"


def read_initial_latents(latents: Any, fps: int | None) -> torch.Tensor | None:
    """The samples of a LATENT of which all is redrawn; None: there is none. `fps`: that of the sampler, if it has
    one."""
    if latents is None:
        return None
    samples = from_latent(NAME, latents)
    if latents.get("noise_mask") is not None:
        raise InvalidValueError(
            f"{NAME} come with a noise_mask, from Set Latent Noise Mask or VAE Encode (for Inpainting), which is not "
            "read here; connect the latents without it",
            field=NAME,
        )
    check_fps(NAME, latents, fps)
    return samples


def settings_for_each(latents: torch.Tensor, settings: GenerationSettings) -> GenerationSettings:
    """A result for each of several latents."""
    count = len(latents)
    if count > 1 and settings.num_videos not in (1, count):
        raise InvalidValueError(
            f"{NAME} hold {count} {'images' if latents.shape[2] == 1 else 'videos'}, and TPU Options ask for "
            f"{settings.num_videos}; leave num_videos at 1",
            field=NAME,
        )
    return settings if count == 1 else dataclasses.replace(settings, num_videos=count)


def start_from(
    pipeline: NodePipeline,
    shared: Mapping[str, torch.Tensor],
    latents: torch.Tensor,
    strength: float,
    settings: GenerationSettings,
) -> dict[str, torch.Tensor]:
    """The embeddings of given media, with the latents, resized, in place of an image or video to start from."""
    from comfy_tpu.pipeline.initial import initial_embeddings, without_initial
    from comfy_tpu.pipeline.latent_resizing import resize_latents

    _check_shape(pipeline, latents, settings)
    resized = resize_latents(pipeline.card, pipeline.from_vae_scale(latents), settings, settings)
    return {**without_initial(shared), **initial_embeddings(resized, strength)}


def _check_shape(pipeline: NodePipeline, latents: torch.Tensor, settings: GenerationSettings) -> None:
    """Any height and width will do."""
    _, channels, frames, height, width = latents.shape
    if channels != pipeline.latent_channels or not latents.numel():
        raise InvalidValueError(
            f"{NAME} have shape {tuple(latents.shape)}, expected (videos, {pipeline.latent_channels}, frames, height, "
            "width): those of another model; connect latents of this one",
            field=NAME,
        )
    card = pipeline.card
    wanted, tokens = card.latent_frames(settings), card.sound_tokens(settings)
    sound = -(-tokens // (height * width))  # in frames of their own, as `packed_sound.py` says
    if frames == wanted + sound:
        return
    if tokens:
        raise InvalidValueError(
            f"{NAME} have {frames} frames, and {settings.num_frames} frames of video at {settings.fps} a second have "
            f"{wanted} with {sound} more for the sound; connect those of a sampler with the same num_frames and fps",
            field=NAME,
        )
    held = (frames - 1) * card.temporal_scale + 1
    raise InvalidValueError(
        f"{NAME} hold {held} frames, and num_frames is {settings.num_frames}; set it to {held}, or make the latents "
        "again",
        field=NAME,
    )
