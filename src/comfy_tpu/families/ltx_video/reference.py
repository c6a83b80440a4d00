"""LTX-Video as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.ltx_video import card
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.all_frames_vae import SPATIAL_SCALE, TEMPORAL_SCALE
from comfy_tpu.families.shared.small_configs import T5_SMALL


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    frame_rate: torch.Tensor,
) -> torch.Tensor:
    batch, _, frames, height, width = latents.shape
    dtype = module.proj_in.weight.dtype
    tokens = module(
        hidden_states=latents.flatten(2).transpose(1, 2).to(dtype),
        encoder_hidden_states=text.to(dtype),
        timestep=timestep.expand(batch),
        encoder_attention_mask=text_mask.squeeze(-1),
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=(TEMPORAL_SCALE / settings.fps, SPATIAL_SCALE, SPATIAL_SCALE),
        return_dict=False,
    )[0]
    velocity: torch.Tensor = tokens.transpose(1, 2).unflatten(2, (frames, height, width))
    return velocity


REFERENCES = {hub_id: Reference(predict) for model in card.CARD.models for hub_id in model.published}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "cross_attention_dim": 128,
        "num_layers": 2,
        "caption_channels": 64,
    },
    "text_encoder": T5_SMALL,
    "vae": {
        "latent_channels": 6,
        "block_out_channels": (8, 8, 16, 16),
        "decoder_block_out_channels": (8, 8, 16, 16),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    },
}
