"""Preview images of latents: as the model's own files or a tiny decoder show them, and of every frame."""

from __future__ import annotations

from typing import Any

import latent_preview
import torch
from PIL import Image

from comfy_tpu.pipeline.preview_images import Previews


class PipelinePreviewer(latent_preview.LatentPreviewer):
    """Shows latents as a pipeline does."""

    def __init__(self, previews: Previews) -> None:
        self._previews = previews

    def decode_latent_to_preview(self, x0: torch.Tensor) -> Image.Image | None:
        """The first frame. x0: [1, channels, frames, height, width], in the transformer's scale."""
        return next(iter(self.render(x0[:, :, :1])), None)

    def render(self, latents: torch.Tensor) -> list[Image.Image]:
        return list(self._previews.render(latents, range(latents.shape[2])))


def preview_frames(previewer: Any, latents: torch.Tensor) -> list[Any]:
    """The images of latents [1, channels, frames, height, width], in the form of ComfyUI's previews.

    One image of the first frame from a previewer that decodes with a network, on the host, and whatever a previewer of
    another node pack gives: it has been given all frames. None of them where ComfyUI's colours are of other channels.
    """
    frames = range(latents.shape[2])
    if isinstance(previewer, PipelinePreviewer):
        size = latent_preview.MAX_PREVIEW_RESOLUTION
        return [("JPEG", image, size) for image in previewer.render(latents)]
    if not isinstance(previewer, latent_preview.Latent2RGBPreviewer):
        return [previewer.decode_latent_to_preview_image("JPEG", latents)]
    if not _is_for_channels(previewer, latents.shape[1]):  # a model whose VAE is not its family's own
        return []
    return [previewer.decode_latent_to_preview_image("JPEG", latents[:, :, frame : frame + 1]) for frame in frames]


def _is_for_channels(previewer: Any, channels: int) -> bool:
    """Whether ComfyUI's colours are of so many channels, reshaped where it does so first."""
    reshape = getattr(previewer, "latent_rgb_factors_reshape", None)
    if reshape is not None:
        try:
            channels = reshape(torch.empty(1, channels, 1, 2, 2, device="meta")).shape[1]
        except RuntimeError:  # it divides them by another number
            return False
    _, own = previewer.latent_rgb_factors.shape  # colours by channels
    return bool(own == channels)
