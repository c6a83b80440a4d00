"""The Wan VAE: one latent frame at a time, with the cache that its causal convolutions read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache
from comfy_tpu.parallel.rules import replicate

SPATIAL_SCALE, TEMPORAL_SCALE = 8, 4
"""Pixels per latent on a side, but for the 5B; and frames per latent, except the first."""


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    model = AutoencoderKLWan.from_config(dict(config))
    _pad_in_convolutions(model)
    return model


def _pad_in_convolutions(model: torch.nn.Module) -> None:
    """Moves the padding of rows and columns into the convolutions; diffusers pads before them, in time and space.

    The result is the same, with one copy of every image less. XLA's convolution without padding is also slow on a CPU:
    a latent frame of 96×64 pixels, a sixth of the published channels, 0.25 s against 0.13 s.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

    for part in model.modules():
        if isinstance(part, WanCausalConv3d):
            columns, _, rows, _, earlier, _ = part._padding
            part._padding = (0, 0, 0, 0, earlier, 0)
            part.padding = (0, rows, columns)


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLWan",),
    build=_build_vae,
    rules=(replicate("*"),),  # 0.25 GB; the image is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    return int(config.get("z_dim", 16))


def latent_statistics(config: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    return config["latents_mean"], config["latents_std"]


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> one frame if it is the first, else four."""
    shape = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(x, device=latent.device).view(shape) for x in latent_statistics(module.config))
    pixels, cache = decode_part(module, latent * std + mean, cache)
    return pixels.add(1).div(2).permute(0, 2, 3, 4, 1), cache


def decode_part(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """`decode_frame` from the VAE's own scale to pixels in -1..1, channels first."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    if cache is None:
        slots: list[Any] = [None] * sum(isinstance(part, torch.nn.Conv3d) for part in module.decoder.modules())
    else:
        slots = list(cache)
    x = module.post_quant_conv(latent.to(module.post_quant_conv.weight.dtype))
    pixels = module.decoder(x, feat_cache=slots, feat_idx=[0], first_chunk=cache is None)
    if module.config.patch_size is not None:
        pixels = unpatchify(pixels, module.config.patch_size)
    return pixels.float().clamp(-1, 1), _pad_cache(slots) if cache is None else slots


def _pad_cache(slots: list[Any]) -> Cache:
    """The cache of the first frame, padded in front with zeros to the two frames that later frames leave.

    A causal convolution pads a shorter cache with the same zeros. So all frames after the first are one program.
    """
    full: list[Any] = []
    for entry in slots:
        if isinstance(entry, str):  # "Rep": an upsampling that passed the first frame by, behind a block of its shape
            full.append(torch.zeros_like(full[-1]))
        elif entry is not None:
            full.append(torch.cat((torch.zeros_like(entry), entry), dim=2))
    return [*full, *[None] * (len(slots) - len(full))]  # convolutions of single pixels remember nothing


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1 or 4, height, width] in -1..1 -> the transformer's latents [batch, channels, 1, …], the cache after.

    The first frame comes alone, without a cache.
    """
    moments, cache = encode_moments(module, pixels, cache)
    mean, std = (
        torch.tensor(values, device=pixels.device).view(1, -1, 1, 1, 1) for values in latent_statistics(module.config)
    )
    return (moments.float().chunk(2, dim=1)[0] - mean) / std, cache


def encode_moments(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """Mean and log variance of `encode_frames`, in the VAE's own scale."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    pixels = pixels.to(module.quant_conv.weight.dtype)
    if module.config.patch_size is not None:
        pixels = patchify(pixels, module.config.patch_size)
    count = sum(isinstance(part, torch.nn.Conv3d) for part in module.encoder.modules())
    slots: list[Any] = [None] * count if cache is None else list(cache)
    moments = module.encoder(pixels, feat_cache=slots, feat_idx=[0])
    return module.quant_conv(moments), slots
