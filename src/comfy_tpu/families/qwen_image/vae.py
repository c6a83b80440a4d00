"""The Qwen-Image VAE: a video VAE of Wan's make, on a single frame.

A causal convolution pads the frames before the first with zeros. On one frame, the last slice of its kernel is all that
counts: a convolution of two dimensions, a third of the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache
from comfy_tpu.parallel.rules import replicate


class FrameConvolution(torch.nn.Conv3d):
    """A causal convolution on the first frame of a video, [batch, channels, 1, height, width]."""

    @classmethod
    def like(cls, convolution: Any) -> FrameConvolution:
        columns, _, rows, _, _, _ = convolution._padding
        sizes = convolution.in_channels, convolution.out_channels, convolution.kernel_size
        return cls(*sizes, stride=convolution.stride, padding=(0, rows, columns))

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        stride, padding = tuple(self.stride[1:]), self.padding[1:]
        return F.conv2d(x.squeeze(2), self.weight[:, :, -1], self.bias, stride, padding).unsqueeze(2)


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLQwenImage
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    model: Any = AutoencoderKLQwenImage.from_config(dict(config))
    for name, part in list(model.named_modules()):
        if isinstance(part, QwenImageCausalConv3d):
            path, _, own = name.rpartition(".")
            parent = model.get_submodule(path)
            if own == "time_conv":  # of later frames alone
                del parent.time_conv
            else:
                setattr(parent, own, FrameConvolution.like(part))
    built: torch.nn.Module = model
    return built


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLQwenImage",),
    build=_build_vae,
    unused=("*.time_conv.*",),
    rules=(replicate("*"),),  # 0.25 GB; the image is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    return int(config.get("z_dim", 16))


def latent_statistics(config: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    return config["latents_mean"], config["latents_std"]


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> the image. The cache is not used."""
    mean, std = _statistics(module, latent.device)
    x = module.post_quant_conv((latent * std + mean).to(module.post_quant_conv.weight.dtype))
    pixels = module.decoder(x, feat_cache=_slots(module.decoder), feat_idx=[0])
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1), []


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1, height, width] in -1..1 -> the mean of the VAE's distribution, as the transformer's latents."""
    mean, std = _statistics(module, pixels.device)
    return (_moments(module, pixels)[0] - mean) / std, []


def encode_image(module: Any, image: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A sample of the latents of an image, as in diffusers' image-to-image pipeline."""
    middle, spread = _moments(module, image.permute(0, 3, 1, 2).mul(2).sub(1).unsqueeze(2))
    mean, std = _statistics(module, image.device)
    return (middle + torch.exp(0.5 * spread.clamp(-30, 20)) * noise - mean) / std


def _moments(module: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log variance, in the VAE's own scale."""
    x = module.encoder(pixels.to(module.quant_conv.weight.dtype), feat_cache=_slots(module.encoder), feat_idx=[0])
    middle, spread = module.quant_conv(x).float().chunk(2, dim=1)
    return middle, spread


def _statistics(module: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in latent_statistics(module.config)
    )
    return mean, std


def _slots(part: torch.nn.Module) -> list[Any]:
    """The empty cache before the first frame: more slots than convolutions, because those of later frames count too."""
    return [None] * len(list(part.modules()))
