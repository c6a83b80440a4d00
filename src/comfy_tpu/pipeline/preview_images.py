"""Small images of latents, for whoever watches a video come into being."""

from __future__ import annotations

import io

import torch
from PIL import Image

from comfy_tpu.pipeline.preview_colours import PreviewColours

_SIDE_MAX = 256
"""Pixels of the longer side of an encoded preview."""


def render_frame(latents: torch.Tensor, colours: PreviewColours, frame: int = 0) -> Image.Image:
    """A pixel for each latent of a frame. latents: [1, channels, frames, height, width], or without frames, in the
    transformer's scale."""
    chosen = latents[0, :, frame] if latents.ndim == 5 else latents[0]
    coloured = colours.apply(chosen.movedim(0, -1).float(), frame)
    return Image.fromarray(coloured.mul(255).round().byte().numpy())


def encode_preview(image: Image.Image) -> bytes:
    """A JPEG file of a few kilobytes."""
    image.thumbnail((_SIDE_MAX, _SIDE_MAX))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
