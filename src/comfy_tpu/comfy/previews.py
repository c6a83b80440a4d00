"""Preview images of latents: in the colours of a model whose VAE is not its family's own, and of every frame."""

from __future__ import annotations

from typing import Any

import latent_preview
import torch
from PIL import Image

from comfy_tpu.pipeline.preview_colours import PreviewColours
from comfy_tpu.pipeline.preview_images import render_frame


class ColourPreviewer(latent_preview.LatentPreviewer):
    """Colours each latent of a frame."""

    def __init__(self, colours: PreviewColours) -> None:
        self._colours = colours

    def decode_latent_to_preview(self, x0: torch.Tensor, frame: int = 0) -> Image.Image:
        """x0: [1, channels, frames, height, width] or [1, channels, height, width], in the transformer's scale."""
        return render_frame(x0, self._colours, frame)


def preview_frames(previewer: Any, latents: torch.Tensor) -> list[Any]:
    """The images of latents [1, channels, frames, height, width], in the form of ComfyUI's previews.

    One image of the first frame from a previewer that decodes with a network, on the host, and whatever a previewer of
    another node pack gives: it has been given all frames. None of them where ComfyUI's colours are of other channels.
    """
    frames = range(latents.shape[2])
    if isinstance(previewer, ColourPreviewer):
        size = latent_preview.MAX_PREVIEW_RESOLUTION
        return [("JPEG", previewer.decode_latent_to_preview(latents, frame), size) for frame in frames]
    if not isinstance(previewer, latent_preview.Latent2RGBPreviewer):
        return [previewer.decode_latent_to_preview_image("JPEG", latents)]
    if len(previewer.latent_rgb_factors) != latents.shape[1]:  # a model whose VAE is not its family's own
        return []
    return [previewer.decode_latent_to_preview_image("JPEG", latents[:, :, frame : frame + 1]) for frame in frames]
