"""The Flux.2 VAE. Its 32 channels in patches of 2 × 2, normalized, are the 128 channels of the latents here, one latent
for 16 × 16 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache
from comfy_tpu.parallel.rules import replicate


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLFlux2

    model: Any = AutoencoderKLFlux2.from_config(dict(config))
    model.bn.num_batches_tracked = None  # a 64-bit count of training, which jax does not hold and nothing reads
    built: torch.nn.Module = model
    return built


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLFlux2",),
    build=_build_vae,
    unused=("bn.num_batches_tracked",),
    float32=("bn.*",),
    rules=(replicate("*"),),  # 0.17 GB; the image is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    """Channels of the patched latents."""
    return 4 * int(config.get("latent_channels", 32))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
    """Zeros and ones: the statistics are weights of the VAE, and its functions here normalize by them."""
    channels = latent_channels(config)
    return [0.0] * channels, [1.0] * channels


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 4 × channels, 1, height, width] of the transformer's latents -> the image. The cache is not used."""
    mean, deviation = statistics(module)
    patches = latent.squeeze(2) * deviation + mean
    x = patches.unflatten(1, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)
    x = x.to(module.decoder.conv_in.weight.dtype)
    pixels = module.decoder(x if module.post_quant_conv is None else module.post_quant_conv(x))
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1).unsqueeze(1), []


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1, height, width] in -1..1 -> the mean of the VAE's distribution, as the transformer's latents."""
    moments = module.encoder(pixels.squeeze(2).to(module.encoder.conv_in.weight.dtype))
    moments = moments if module.quant_conv is None else module.quant_conv(moments)
    middle = moments.float().chunk(2, dim=1)[0]
    patches = middle.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    mean, deviation = statistics(module)
    return ((patches - mean) / deviation).unsqueeze(2), []


def statistics(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the VAE's patches, in the shape of images."""
    mean, variance = (x.view(1, -1, 1, 1) for x in (module.bn.running_mean, module.bn.running_var))
    return mean, torch.sqrt(variance + module.config.batch_norm_eps)
