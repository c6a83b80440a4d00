"""A small random LTX-2 on disk, with every piece that the real model directory has."""

from __future__ import annotations

import functools
from typing import Any

from diffusers import LTX2VideoTransformer3DModel

from comfy_tpu.families.ltx2 import transformer as ltx2_transformer
from tests.parity.small_models import SmallModel, small_model

TEXT_TOKENS = 16
HEADS, HEAD_DIM, AUDIO_HEAD_DIM, TEXT, CHANNELS = 8, 14, 6, 16, 8
HIDDEN, AUDIO_HIDDEN = HEADS * HEAD_DIM, HEADS * AUDIO_HEAD_DIM
"""112, which six does not divide: as 4096, four features are not turned by RoPE."""

TRANSFORMER: dict[str, Any] = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "cross_attention_dim": HIDDEN,
    "audio_in_channels": CHANNELS,
    "audio_out_channels": CHANNELS,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": AUDIO_HEAD_DIM,
    "audio_cross_attention_dim": AUDIO_HIDDEN,
    "num_layers": 3,
    "caption_channels": TEXT,
    "rope_type": "split",
    "perturbed_attn": True,
}
LATER: dict[str, Any] = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}
"""What LTX-2.3 changed."""


@functools.cache
def transformer(*, later: bool = False, rope_type: str = "split") -> SmallModel:
    config = TRANSFORMER | {"rope_type": rope_type} | (LATER if later else {})
    spec = ltx2_transformer.MODULATED_TRANSFORMER if later else ltx2_transformer.TRANSFORMER
    return small_model(spec, config, lambda: LTX2VideoTransformer3DModel(**config))
