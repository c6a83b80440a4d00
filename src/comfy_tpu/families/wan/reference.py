"""Wan as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.published_configs import T5_SMALL, UMT5_XXL
from comfy_tpu.families.wan import card

_CLIP_H: Config = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "projection_dim": 1024,
}
_VAE_5B: Config = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
"""The VAE of the 5B, without the published latent statistics, which do not change the cost."""


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    condition: torch.Tensor | None = None,
    image: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = module.patch_embedding.weight.dtype
    hidden = latents if condition is None else torch.cat((latents, condition.to(latents.dtype)), dim=1)
    velocity: torch.Tensor = module(
        hidden_states=hidden.to(dtype),
        timestep=timestep.expand(latents.shape[0]),
        encoder_hidden_states=text.to(dtype),
        encoder_hidden_states_image=None if image is None else image.to(dtype),
        return_dict=False,
    )[0]
    return velocity


_PARTS: dict[str, Config] = {"text_encoder": UMT5_XXL, "vae": {}, "image_encoder": _CLIP_H}
REFERENCES = {
    hub_id: Reference(predict, {**_PARTS, "vae": _VAE_5B} if model is card.WAN22_5B else _PARTS)
    for model in card.CARD.models
    for hub_id in model.published
}
SMALL: dict[str, Config] = {
    "transformer": {
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "text_dim": 64,
        "freq_dim": 64,
        "ffn_dim": 256,
        "num_layers": 2,
    },
    "text_encoder": T5_SMALL,
    "vae": {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
}
