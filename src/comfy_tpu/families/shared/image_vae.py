"""The VAE of images that Flux.1 was trained with, and Z-Image after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache, Vae
from comfy_tpu.parallel.rules import replicate


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_config(dict(config))


_COMPONENT = ComponentSpec(
    name="vae",
    classes=("AutoencoderKL",),
    build=_build_vae,
    rules=(replicate("*"),),  # 0.17 GB; the image is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    return int(config.get("latent_channels", 16))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
    channels = latent_channels(config)
    return [float(config["shift_factor"])] * channels, [1 / float(config["scaling_factor"])] * channels


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> the image. The cache is not used."""
    mean, std = (torch.tensor(x, device=latent.device).view(1, -1, 1, 1) for x in latent_statistics(module.config))
    x = (latent.squeeze(2) * std + mean).to(module.decoder.conv_in.weight.dtype)
    pixels = module.decoder(x if module.post_quant_conv is None else module.post_quant_conv(x))
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1).unsqueeze(1), []


def encode_image(module: Any, image: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A sample of the latents of an image, as in diffusers' image-to-image pipeline."""
    pixels = image.permute(0, 3, 1, 2).mul(2).sub(1).to(module.encoder.conv_in.weight.dtype)
    moments = module.encoder(pixels)
    moments = (moments if module.quant_conv is None else module.quant_conv(moments)).float()
    middle, spread = moments.chunk(2, dim=1)
    sample = middle + torch.exp(0.5 * spread.clamp(-30, 20)) * noise.squeeze(2)
    mean, std = (torch.tensor(x, device=sample.device).view(1, -1, 1, 1) for x in latent_statistics(module.config))
    return ((sample - mean) / std).unsqueeze(2)


IMAGE_VAE = Vae(
    component=_COMPONENT,
    decode_frame=decode_frame,
    latent_channels=latent_channels,
    latent_statistics=latent_statistics,
    encode_image=encode_image,
)
