"""LTX-Video's VAE: 32 × 32 pixels and eight frames to a latent, and a decoder that looks at frames to come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache
from comfy_tpu.families.shared.config_checks import refuse_unknown_keys
from comfy_tpu.parallel.rules import replicate

SPATIAL_SCALE = 32
TEMPORAL_SCALE = 8


def build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLLTXVideo

    refuse_unknown_keys(AutoencoderKLLTXVideo, config)
    if any(config.get("decoder_inject_noise", ())):
        raise UnsupportedError(
            "the VAE adds random noise while it decodes (decoder_inject_noise, LTX-Video 0.9.1), which is not "
            "supported; use LTX-Video 0.9.0 (Lightricks/LTX-Video), or another VAE without it"
        )
    model = AutoencoderKLLTXVideo.from_config(dict(config))
    if (model.spatial_compression_ratio, model.temporal_compression_ratio) != (SPATIAL_SCALE, TEMPORAL_SCALE):
        raise UnsupportedError(
            f"the VAE has {model.spatial_compression_ratio} × {model.spatial_compression_ratio} pixels and "
            f"{model.temporal_compression_ratio} frames to a latent, expected {SPATIAL_SCALE} × {SPATIAL_SCALE} and "
            f"{TEMPORAL_SCALE}; use the VAE of the model's own directory"
        )
    return model


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLLTXVideo",),
    build=build_vae,
    rules=(replicate("*"),),  # 0.8 GB; the image is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    return int(config.get("latent_channels", 128))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
    """Zeros and ones: the statistics are weights of the VAE, and its functions here normalize by them.

    ComfyUI's own latents of this family are normalized, too.
    """
    channels = latent_channels(config)
    return [0.0] * channels, [1.0] * channels


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, n, height, width], all of the transformer's latents -> 8n - 7 frames. The cache is not used."""
    mean, deviation = _statistics(module)
    x = (latent * deviation / module.config.scaling_factor + mean).to(module.decoder.conv_in.conv.weight.dtype)
    # A decoder that also takes noise away is told that there is none, which is what diffusers' pipeline asks for.
    clean = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device) if module.config.timestep_conditioning else None
    pixels = module.decoder(x, clean)
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1), []


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1, height, width] in -1..1 -> the transformer's latents of a first frame: the mean of the VAE's
    distribution, from which diffusers draws a sample."""
    moments = module.encoder(pixels.to(module.encoder.conv_in.conv.weight.dtype)).float()
    mean, deviation = _statistics(module)
    return (moments.chunk(2, dim=1)[0] - mean) / deviation, []


def _statistics(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mean, deviation = (x.float().view(1, -1, 1, 1, 1) for x in (module.latents_mean, module.latents_std))
    return mean, deviation
