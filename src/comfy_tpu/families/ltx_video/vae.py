"""LTX-Video's VAE: 32 × 32 pixels and eight frames to a latent, and a decoder that looks at frames to come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.all_frames_vae import check_scales
from comfy_tpu.parallel.rules import replicate


def build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLLTXVideo

    if any(config.get("decoder_inject_noise", ())):
        raise UnsupportedError(
            "the VAE adds random noise while it decodes (decoder_inject_noise, LTX-Video 0.9.1), which is not "
            "supported; use LTX-Video 0.9.0 (Lightricks/LTX-Video), or another VAE without it"
        )
    model = AutoencoderKLLTXVideo.from_config(dict(config))
    check_scales(model)
    return model


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLLTXVideo",),
    build=build_vae,
    rules=(replicate("*"),),  # 0.8 GB; the image is split over the mesh, not the weights
)
