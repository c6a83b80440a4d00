"""The encoder of the Wan VAE a few frames at a time, as `families.wan.decode_frame` is for the decoder.

Here and not in the family: nothing but the benchmark encodes pictures yet. A pipeline from images would take it over.
"""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.families.family import Cache


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1 or 4, height, width] in -1..1 -> moments [batch, 2 · channels, 1, height, width], the cache after.

    The first frame comes alone, without a cache.
    """
    count = sum(isinstance(part, torch.nn.Conv3d) for part in module.encoder.modules())
    slots: list[Any] = [None] * count if cache is None else list(cache)
    moments = module.encoder(pixels, feat_cache=slots, feat_idx=[0])
    return module.quant_conv(moments), slots
