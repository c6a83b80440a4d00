"""Denoising that starts from an image or a video instead of from noise alone.

The latents to start from, and how much of them is replaced, are embeddings like those of other given media, so that
they go wherever embeddings go: into files, over a network, through the links of nodes.
"""

from __future__ import annotations

import math

import torch

from comfy_tpu.config import INIT_IMAGE_STRENGTH, INIT_VIDEO_STRENGTH, GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.pipeline.embeddings import Embeddings

INITIAL, STRENGTH = "initial", "strength"
"""The names of the embeddings: latents [1, channels, frames, height, width] in the transformer's scale; and the share
of the steps that are run, counted from the last, [1, 1]: 1 keeps nothing of the image."""
_DIGITS = 6


def default_strength(card: ModelCard) -> float:
    return INIT_IMAGE_STRENGTH if card.starts_from_image else INIT_VIDEO_STRENGTH


def initial_embeddings(latents: torch.Tensor, strength: float) -> dict[str, torch.Tensor]:
    return {INITIAL: latents, STRENGTH: torch.tensor([[float(strength)]])}


def without_initial(shared: Embeddings) -> dict[str, torch.Tensor]:
    """The embeddings of given media that the transformer reads."""
    return {name: rows for name, rows in shared.items() if name not in (INITIAL, STRENGTH)}


def read_strength(shared: Embeddings) -> float:
    """The strength; 1 where denoising starts from noise. Rounded: as float32, 0.7 of ten steps would be six."""
    return round(float(shared[STRENGTH]), _DIGITS) if STRENGTH in shared else 1.0


def first_step(card: ModelCard, count: int, strength: float) -> int:
    """The number of the first step that is run, from 0, as diffusers' pipelines count: the one for images rounds up
    what is run, the one for videos down."""
    if card.starts_from_image:
        return int(max(count - min(count * strength, count), 0))
    return max(count - min(int(count * strength), count), 0)


def check_strength(card: ModelCard, strength: float, settings: GenerationSettings) -> None:
    steps = settings.num_inference_steps
    if not isinstance(strength, (int, float)) or isinstance(strength, bool) or not 0 < strength <= 1:
        raise InvalidValueError(f"strength={strength!r} is not a number over 0, up to 1", field="strength")
    if first_step(card, steps, round(strength, _DIGITS)) == steps:
        least = math.ceil(1000 / steps) / 1000
        advice = f"use {least:g} or more" if least < 1 else "use 1, or more steps"
        raise InvalidValueError(
            f"strength={strength} leaves none of {steps} steps; {advice}",
            field="strength",
        )
