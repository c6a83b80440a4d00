"""What turns latents into frames: the model's VAE, or a tiny decoder in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.model_family import ModelFamily, Tiles, VaeFunctions
from comfy_tpu.families.shared import tiny_decoders
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.pipeline.vae_backend import COLUMN_AXES


@dataclasses.dataclass(frozen=True)
class FrameDecoder:
    component: ComponentSpec
    decode_frame: Callable[..., tuple[Any, Any]]
    """As in `VaeFunctions`."""
    axes: Mapping[str, Axes]
    first_cache: Callable[[int], Any] = lambda frames: None
    """As in `Vae`, like the following."""
    decodes_all_frames: bool = False
    tiles: Tiles = dataclasses.field(default_factory=Tiles)


_AXES = {"latent": COLUMN_AXES, "cache": COLUMN_AXES}
TINY_DECODER = FrameDecoder(tiny_decoders.TINY_VAE, tiny_decoders.decode_frame, _AXES)
TINY_PREVIEWS = FrameDecoder(tiny_decoders.TINY_VAE, tiny_decoders.decode_preview, _AXES)
"""One small frame for each latent."""


def vae_decoder(family: ModelFamily, functions: VaeFunctions) -> FrameDecoder:
    """The decoder of the family's VAE, in the implementation that was chosen."""
    vae = family.vae
    return FrameDecoder(
        vae.component, functions.decode_frame, functions.decode_axes, vae.first_cache, vae.decodes_all_frames, vae.tiles
    )
