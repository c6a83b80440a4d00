"""Previews in the colours of a model whose VAE is not its family's own."""

from __future__ import annotations

import latent_preview
import torch
from PIL import Image

from comfy_tpu.pipeline.preview_colours import PreviewColours


class ColourPreviewer(latent_preview.LatentPreviewer):
    """Colours each latent of the first frame."""

    def __init__(self, colours: PreviewColours) -> None:
        self._colours = colours

    def decode_latent_to_preview(self, x0: torch.Tensor) -> Image.Image:
        """x0: [1, channels, frames, height, width] or [1, channels, height, width], in the transformer's scale."""
        frame = x0[0, :, 0] if x0.ndim == 5 else x0[0]
        colours = self._colours.apply(frame.movedim(0, -1).float())
        return Image.fromarray(colours.mul(255).round().byte().numpy())
