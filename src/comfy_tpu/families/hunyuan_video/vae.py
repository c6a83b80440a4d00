"""The decoder of HunyuanVideo-1.5's VAE, one latent frame at a time.

Its convolutions look two frames back, and the attention in its middle looks back at every frame before. Both are
causal, so a frame can be decoded when it comes: the cache holds two frames for each convolution, and keys and values
of all latent frames (457 MB in bfloat16 for 121 frames at 720p). Room for those is made with the first frame; a cache
that grew would be another program at every frame. So there are two programs, of the first frame and of all others,
whatever the length, and the memory of an upsampled video is that of four frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.config import MESH_AXES
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Cache
from comfy_tpu.families.shared.building import refuse_unknown_keys
from comfy_tpu.parallel.rules import replicate

SPATIAL_SCALE = 16
TEMPORAL_SCALE = 4


def build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo15

    refuse_unknown_keys(AutoencoderKLHunyuanVideo15, config)
    return AutoencoderKLHunyuanVideo15.from_config(dict(config))


def _build_decoder(config: Mapping[str, Any]) -> torch.nn.Module:
    model = build_vae(config)
    del model.encoder
    return model


VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKLHunyuanVideo15",),
    build=_build_decoder,
    unused=("encoder.*",),
    rules=(replicate("*"),),  # the image is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    return int(config.get("latent_channels", 32))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
    channels = latent_channels(config)
    return [0.0] * channels, [1 / config.get("scaling_factor", 1.03682)] * channels


def first_cache(frames: int) -> Cache:
    """Says how many latent frames will come: a place for each, with 0 until its keys and values are known."""
    return [torch.zeros(1, 1, frames, 1, 1)]


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> one frame if it is the first, else four."""
    decoder = _FrameDecoder(cache)
    x = (latent / module.config.scaling_factor).to(module.decoder.conv_in.conv.weight.dtype)
    pixels = decoder.decode(module.decoder, x)
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1), decoder.after()


def with_edges_repeated(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """`x` with its first and last entries repeated along a dimension: F.pad with mode="replicate".

    That one is a gather, which the partitioner does not divide along the columns that are split over the mesh.
    """
    size = x.shape[dim]
    widths = [0, 0] * (-dim - 1) + [before, after]
    place = torch.arange(before + size + after, device=x.device).view(-1, *(1,) * (-dim - 1))
    first, last = x.narrow(dim, 0, 1), x.narrow(dim, size - 1, 1)
    return torch.where(place < before, first, torch.where(place >= before + size, last, F.pad(x, widths)))


def in_columns(x: torch.Tensor) -> torch.Tensor:
    """What comes out of an attention, split over the mesh as every image here.

    The attention's own layout, tokens over the mesh, would become rows and columns over it, and XLA computes
    convolutions wrongly where neither divides (2 × 3 latents on dp=2,tp=4; jax 0.10.2, on CPUs).
    """
    return constrain(x, None, None, None, None, MESH_AXES)


class _FrameDecoder:
    """diffusers' decoder on one latent frame, with what it remembers of those before."""

    def __init__(self, cache: Cache) -> None:
        self._seen, *rest = (entry for entry in cache if entry is not None)
        self._is_first = not rest
        self._pairs = rest[:2]
        """Keys and values."""
        self._before = iter(rest[2:])
        self._remembered: list[torch.Tensor] = []

    def after(self) -> Cache:
        return [self._seen, *self._pairs, *self._remembered]

    def decode(self, decoder: Any, z: torch.Tensor) -> torch.Tensor:
        x = self._convolve(decoder.conv_in, z) + z.repeat_interleave(decoder.repeat, dim=1)
        middle = decoder.mid_block
        x = self._resnet(middle.resnets[0], x)
        # There is one attention, whose memory is the cache's: more would be given its keys.
        (attention,) = middle.attentions
        x = self._resnet(middle.resnets[1], self._attend(attention, x))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._resnet(resnet, x)
            for upsampler in block.upsamplers or ():
                x = self._upsample(upsampler, x)
        return self._convolve(decoder.conv_out, decoder.conv_act(decoder.norm_out(x)))

    def _convolve(self, causal: Any, x: torch.Tensor) -> torch.Tensor:
        *sides, behind, _ = causal.time_causal_padding
        before = x[:, :, :1].expand(-1, -1, behind, -1, -1) if self._is_first else next(self._before)
        joined = torch.cat((before, x), dim=2)
        self._remembered.append(joined[:, :, -behind:])
        return causal.conv(with_edges_repeated(with_edges_repeated(joined, -1, *sides[:2]), -2, *sides[2:]))

    def _resnet(self, resnet: Any, x: torch.Tensor) -> torch.Tensor:
        h = self._convolve(resnet.conv1, resnet.nonlinearity(resnet.norm1(x)))
        h = self._convolve(resnet.conv2, resnet.nonlinearity(resnet.norm2(h)))
        return h + (x if resnet.conv_shortcut is None else resnet.conv_shortcut(x))

    def _attend(self, attention: Any, x: torch.Tensor) -> torch.Tensor:
        normed = attention.norm(x)
        query, new = attention.to_q(normed), (attention.to_k(normed), attention.to_v(normed))
        frames = self._seen.shape[2]
        place = torch.arange(frames, device=x.device).view(1, 1, -1, 1, 1)
        here = place == self._seen.sum().to(place.dtype)
        if self._is_first:
            room = torch.zeros(*x.shape[:2], frames, *x.shape[3:], dtype=x.dtype, device=x.device)
            self._pairs = [room, room]
        self._pairs = [torch.where(here, one, known) for one, known in zip(new, self._pairs, strict=True)]
        self._seen = torch.where(here, 1.0, self._seen)
        shown = (self._seen > 0).expand(1, 1, frames, *x.shape[3:]).reshape(1, 1, 1, -1)
        # One head: [batch, 1, tokens, channels].
        q, k, v = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in (query, *self._pairs))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        return in_columns(x + attention.proj_out(out.squeeze(1).transpose(1, 2).reshape(query.shape)))

    def _upsample(self, upsampler: Any, x: torch.Tensor) -> torch.Tensor:
        spread, repeats = upsampler._dcae_upsample_rearrange, upsampler.repeats
        h = self._convolve(upsampler.conv, x)
        if not upsampler.add_temporal_upsample:
            return spread(h) + spread(x.repeat_interleave(repeats, dim=1))
        if not self._is_first:
            return spread(h, r1=2) + spread(x, r1=2).repeat_interleave(repeats, dim=1)
        # The first frame becomes one frame: of what would be two, the first half of the channels.
        one = spread(h)
        return one[:, : one.shape[1] // 2] + spread(x).repeat_interleave(repeats // 2, dim=1)
