"""Small images of latents, for whoever watches a video come into being."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Protocol

import torch
from PIL import Image

from comfy_tpu.pipeline.preview_colours import PreviewColours

logger = logging.getLogger(__name__)

_SIDE_MAX = 256
"""Pixels of the longer side of an encoded preview."""


class Previews(Protocol):
    def render(self, latents: torch.Tensor, frames: range) -> Iterator[Image.Image]:
        """Images of some latent frames, in their order. latents: [1, channels, frames, height, width] in the
        transformer's scale. Fewer images where no more can be made."""
        ...


class ColourPreviews:
    """A pixel for each latent, by its colour."""

    def __init__(self, colours: PreviewColours) -> None:
        self._colours = colours

    def render(self, latents: torch.Tensor, frames: range) -> Iterator[Image.Image]:
        return (render_frame(latents, self._colours, frame) for frame in frames)


def render_frame(latents: torch.Tensor, colours: PreviewColours, frame: int = 0) -> Image.Image:
    """A pixel for each latent of a frame. latents: [1, channels, frames, height, width], or without frames, in the
    transformer's scale."""
    chosen = latents[0, :, frame] if latents.ndim == 5 else latents[0]
    return to_image(colours.apply(chosen.movedim(0, -1).float(), frame))


def to_image(pixels: torch.Tensor) -> Image.Image:
    """[height, width, 3] in 0..1 as an image."""
    return Image.fromarray(pixels.mul(255).round().byte().numpy())


def encode_preview(image: Image.Image) -> bytes:
    """A JPEG file of a few kilobytes."""
    image.thumbnail((_SIDE_MAX, _SIDE_MAX))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
