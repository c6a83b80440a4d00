"""The decoder of HunyuanVideo-1.5's VAE, one latent frame at a time.

Its convolutions look two frames back, and the attention in its middle looks back at all earlier frames. Both are
causal, so frames can be decoded one by one: the cache holds two frames for each convolution, and keys and values of all
latent frames (457 MB in bfloat16 for 121 frames at 720p). They are allocated with the first frame; a growing cache
would be another program for every frame. So there are two programs, for the first frame and for all others, whatever
the length, and an upsampled video takes the memory of four frames.
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
from comfy_tpu.parallel.rules import replicate

SPATIAL_SCALE = 16
TEMPORAL_SCALE = 4


def build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo15

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
    """A cache with a slot for each latent frame: 0 until the frame's keys and values are computed."""
    return [torch.zeros(1, 1, frames, 1, 1)]


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> one frame if it is the first, else four."""
    decoder = _FrameDecoder(cache)
    x = (latent / module.config.scaling_factor).to(module.decoder.conv_in.conv.weight.dtype)
    pixels = decoder.decode(module.decoder, x)
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1), decoder.next_cache()


def pad_replicate(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """`x` with its first and last entries repeated along a dimension: F.pad with mode="replicate".

    F.pad is a gather, which the partitioner does not split along columns that are split over the mesh.
    """
    size = x.shape[dim]
    widths = [0, 0] * (-dim - 1) + [before, after]
    place = torch.arange(before + size + after, device=x.device).view(-1, *(1,) * (-dim - 1))
    first, last = x.narrow(dim, 0, 1), x.narrow(dim, size - 1, 1)
    return torch.where(place < before, first, torch.where(place >= before + size, last, F.pad(x, widths)))


def split_columns(x: torch.Tensor) -> torch.Tensor:
    """Constrains the output of an attention to be split by columns over the mesh, like every image here.

    The attention's own layout, tokens over the mesh, would become rows and columns over it, and XLA computes
    convolutions wrongly where neither divides (2 × 3 latents on dp=2,tp=4; jax 0.10.2, on CPUs).
    """
    return constrain(x, None, None, None, None, MESH_AXES)


class _FrameDecoder:
    """diffusers' decoder on one latent frame, with the cache of the frames before."""

    def __init__(self, cache: Cache) -> None:
        self._filled_slots, *rest = (entry for entry in cache if entry is not None)
        self._is_first = not rest
        self._keys_and_values = rest[:2]
        """Keys and values of all latent frames."""
        self._cached_frames = iter(rest[2:])
        self._next_frames: list[torch.Tensor] = []

    def next_cache(self) -> Cache:
        return [self._filled_slots, *self._keys_and_values, *self._next_frames]

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
        before = x[:, :, :1].expand(-1, -1, behind, -1, -1) if self._is_first else next(self._cached_frames)
        joined = torch.cat((before, x), dim=2)
        self._next_frames.append(joined[:, :, -behind:])
        return causal.conv(pad_replicate(pad_replicate(joined, -1, *sides[:2]), -2, *sides[2:]))

    def _resnet(self, resnet: Any, x: torch.Tensor) -> torch.Tensor:
        h = self._convolve(resnet.conv1, resnet.nonlinearity(resnet.norm1(x)))
        h = self._convolve(resnet.conv2, resnet.nonlinearity(resnet.norm2(h)))
        return h + (x if resnet.conv_shortcut is None else resnet.conv_shortcut(x))

    def _attend(self, attention: Any, x: torch.Tensor) -> torch.Tensor:
        normed = attention.norm(x)
        query, new = attention.to_q(normed), (attention.to_k(normed), attention.to_v(normed))
        frames = self._filled_slots.shape[2]
        place = torch.arange(frames, device=x.device).view(1, 1, -1, 1, 1)
        here = place == self._filled_slots.sum().to(place.dtype)
        if self._is_first:
            room = torch.zeros(*x.shape[:2], frames, *x.shape[3:], dtype=x.dtype, device=x.device)
            self._keys_and_values = [room, room]
        self._keys_and_values = [
            torch.where(here, one, known) for one, known in zip(new, self._keys_and_values, strict=True)
        ]
        self._filled_slots = torch.where(here, 1.0, self._filled_slots)
        shown = (self._filled_slots > 0).expand(1, 1, frames, *x.shape[3:]).reshape(1, 1, 1, -1)
        # One head: [batch, 1, tokens, channels].
        q, k, v = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in (query, *self._keys_and_values))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        return split_columns(x + attention.proj_out(out.squeeze(1).transpose(1, 2).reshape(query.shape)))

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
