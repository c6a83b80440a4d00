"""Wan as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.small_configs import T5_SMALL
from comfy_tpu.families.wan import card


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


def predict_with_control(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    control: torch.Tensor,
    control_scale: torch.Tensor,
) -> torch.Tensor:
    dtype = module.patch_embedding.weight.dtype
    velocity: torch.Tensor = module(
        hidden_states=latents.to(dtype),
        timestep=timestep.expand(latents.shape[0]),
        encoder_hidden_states=text.to(dtype),
        control_hidden_states=control.to(dtype),
        control_hidden_states_scale=control_scale[0].to(dtype),
        return_dict=False,
    )[0]
    return velocity


_PREDICT = dict.fromkeys((card.WAN_VACE.name, card.WAN22_VACE.name), predict_with_control)
REFERENCES = {
    hub_id: Reference(_PREDICT.get(model.name, predict)) for model in card.CARD.models for hub_id in model.published
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
