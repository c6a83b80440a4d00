"""Images that Qwen-Image-Edit changes: the transformer reads latents of them, and the text encoder sees them.

Whatever its size, an image becomes one of a million pixels for the VAE. Edit shows the same one to the text encoder;
Plus, which takes several, one of 384 × 384 pixels in all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import FittedMedia, reference_clips
from comfy_tpu.families.model_family import MediaEncoding
from comfy_tpu.families.qwen_image import text
from comfy_tpu.families.qwen_image.card import RESULT_AREA
from comfy_tpu.families.shared.sizes import target_size

VAE_AREA = RESULT_AREA
SHOWN_AREA = 384 * 384
_NAMES = [f"reference_{number}" for number in (1, 2, 3, 4)]
_TOKEN_SIDE = 28
"""Pixels of a token of the vision model, on a side."""


def _resize(image: Image.Image, area: int) -> Image.Image:
    return image.resize(target_size(*image.size, area), resample=Image.Resampling.LANCZOS)


def fit(image: Image.Image) -> Image.Image:
    """The image that the VAE reads, and the text encoder of Edit."""
    return _resize(image, VAE_AREA)


def shrink(image: Image.Image) -> Image.Image:
    """The image that the text encoder of Plus sees."""
    return _resize(image, SHOWN_AREA)


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    return dict(zip(_NAMES, (latent for (latent,) in latents.values()), strict=False))


def embedding_shapes(shown_area: int, config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    """Those of a request with one square image; others have their own."""
    shown, side = round(math.isqrt(shown_area) / _TOKEN_SIDE), math.isqrt(VAE_AREA) // 8
    length, features = text.embedding_shapes(config, settings)["text"]
    channels = config.get("in_channels", 64) // 4
    return {
        "text": (text.shown_length([(shown, shown)], length), features),
        "reference_1": (channels, 1, side, side),
    }


REFERENCES = MediaEncoding(reference_clips, condition, optional_embeddings=tuple(_NAMES[1:]), fit_reference=fit)
