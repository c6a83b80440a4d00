"""diffusers' Wan VAE over a whole video in one program: as its own loop writes it out, and scanned over the frames.

In the scale of the VAE itself, as `nnx.decoding` has both for the Flax model. The pipeline runs a frame at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.bridge import constrain, scan
from comfy_tpu.config import MESH_AXES
from comfy_tpu.families.wan.card import WAN21
from comfy_tpu.families.wan.vae import decode_part, encode_moments

COLUMNS = (None, None, None, None, MESH_AXES)
DECODE_AXES = {"latents": COLUMNS}
ENCODE_AXES = {"video": COLUMNS}


def decode_unrolled(module: Any, latents: torch.Tensor) -> torch.Tensor:
    pixels: torch.Tensor = module.decode(latents.to(module.post_quant_conv.weight.dtype), return_dict=False)[0]
    return pixels.float()


def decode_scanned(module: Any, latents: torch.Tensor) -> torch.Tensor:
    first, cache = decode_part(module, latents[:, :, :1], None)
    if latents.shape[2] == 1:
        return first

    def others(cache: Any, latent: torch.Tensor) -> tuple[Any, torch.Tensor]:
        pixels, cache = decode_part(module, latent, _by_columns(cache))
        return _by_columns(cache), pixels

    _, parts = scan(others, _by_columns(cache), latents[:, :, 1:].unflatten(2, (-1, 1)).movedim(2, 0))
    return torch.cat((first, parts.movedim(0, 2).flatten(2, 3)), dim=2)


def encode_unrolled(module: Any, video: torch.Tensor) -> torch.Tensor:
    moments: torch.Tensor = module._encode(video.to(module.quant_conv.weight.dtype))
    return moments.float()


def encode_scanned(module: Any, video: torch.Tensor) -> torch.Tensor:
    """The second part stands apart too: the cache has its full length behind it."""
    moments, cache = encode_moments(module, video[:, :, :1], None)
    found = [moments]
    count = (video.shape[2] - 1) // WAN21.temporal_scale
    parts = video[:, :, 1 : 1 + count * WAN21.temporal_scale].unflatten(2, (count, WAN21.temporal_scale)).movedim(2, 0)
    if count:
        moments, cache = encode_moments(module, parts[0], cache)
        found.append(moments)
    if count > 1:

        def others(cache: Any, pixels: torch.Tensor) -> tuple[Any, torch.Tensor]:
            moments, cache = encode_moments(module, pixels, _by_columns(cache))
            return _by_columns(cache), moments

        _, behind = scan(others, _by_columns(cache), parts[1:])
        found.append(behind.movedim(0, 2).flatten(2, 3))
    return torch.cat(found, dim=2).float()


def _by_columns(cache: Any) -> Any:
    return [None if entry is None else constrain(entry, *COLUMNS) for entry in cache]
