"""The VAEs of Lightricks' models: 32 × 32 pixels and eight frames to a latent, and a decoder that looks at frames to
come."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache, Tiles, Vae

SPATIAL_SCALE = 32
TEMPORAL_SCALE = 8


def check_scales(model: Any) -> None:
    """Raises UnsupportedError for a VAE of other scales."""
    if (model.spatial_compression_ratio, model.temporal_compression_ratio) != (SPATIAL_SCALE, TEMPORAL_SCALE):
        raise UnsupportedError(
            f"the VAE has {model.spatial_compression_ratio} × {model.spatial_compression_ratio} pixels and "
            f"{model.temporal_compression_ratio} frames to a latent, expected {SPATIAL_SCALE} × {SPATIAL_SCALE} and "
            f"{TEMPORAL_SCALE}; use the VAE of the model's own directory"
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
    """[batch, 3, 8n - 7, height, width] in -1..1 -> the transformer's latents of a first frame, or of all: the mean of
    the VAE's distribution, from which diffusers draws a sample. The cache is not used."""
    moments = module.encoder(pixels.to(module.encoder.conv_in.conv.weight.dtype)).float()
    mean, deviation = _statistics(module)
    return (moments.chunk(2, dim=1)[0] - mean) / deviation, []


def _statistics(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mean, deviation = (x.float().view(1, -1, 1, 1, 1) for x in (module.latents_mean, module.latents_std))
    return mean, deviation


def make_vae(component: ComponentSpec) -> Vae:
    return Vae(
        component=component,
        decode_frame=decode_frame,
        latent_channels=latent_channels,
        latent_statistics=latent_statistics,
        encode_frames=encode_frames,
        decodes_all_frames=True,
        tiles=Tiles(side=16, overlap=4, frames=33, frame_overlap=4),  # 512 pixels, 257 frames
    )
