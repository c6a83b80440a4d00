"""LTX-2's VAE of the video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.all_frames_vae import check_scales
from comfy_tpu.parallel.rules import replicate


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLLTX2Video

    noise = config.get("decoder_inject_noise", False)
    if config.get("timestep_conditioning") or (any(noise) if isinstance(noise, (list, tuple)) else noise):
        raise UnsupportedError(
            "the VAE takes noise away or adds it while it decodes (timestep_conditioning, decoder_inject_noise), and "
            "that of every LTX-2 that was published does not; use one of those"
        )
    model = AutoencoderKLLTX2Video.from_config(dict(config))
    check_scales(model)
    return model


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLLTX2Video",),
    build=_build_vae,
    rules=(replicate("*"),),  # 2.4 GB; the image is split over the mesh, not the weights
)
