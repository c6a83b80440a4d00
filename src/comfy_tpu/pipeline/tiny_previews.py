"""Previews by a tiny decoder: on the devices, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.errors import DeviceMemoryError
from comfy_tpu.pipeline.frame_decoder import TINY_PREVIEWS
from comfy_tpu.pipeline.preview_images import to_image
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.vae_backend import split_columns

logger = logging.getLogger(__name__)


class TinyPreviews:
    """The last frame of each latent, at most 512 pixels wide. Made from the first latent on, since a frame is decoded
    with the one before it: all 21 latents of 832×480×81 are 18 TFLOP, 2 % of one step of Wan 2.1 14B."""

    def __init__(self, running: RunningModel) -> None:
        self._running = running
        self._is_off = False

    def render(self, latents: torch.Tensor, frames: range) -> Iterator[Image.Image]:
        running, decoder = self._running, TINY_PREVIEWS
        if self._is_off or not frames:
            return
        axes = split_columns(decoder.axes, latents.shape[-1], running.placement)
        program = running.program(decoder.component, decoder.decode_frame, input_axes=axes, donate=("cache",))
        try:
            with running.weights(decoder.component) as weights:
                cache = None
                for number, latent in enumerate(latents[:, :, : max(frames) + 1].float().split(1, dim=2)):
                    image, cache = program(weights, latent=latent.contiguous(), cache=cache)
                    if number in frames:
                        yield to_image(to_host(image)[0, 0])
        except DeviceMemoryError as error:
            # A preview is not worth a video.
            self._is_off = True
            logger.warning("previews end: the tiny decoder does not fit beside the model (%s)", error)
