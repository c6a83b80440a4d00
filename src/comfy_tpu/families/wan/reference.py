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
    "hidden_act": "gelu",
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
    "latents_mean": [
        -0.2289,
        -0.0052,
        -0.1323,
        -0.2339,
        -0.2799,
        0.0174,
        0.1838,
        0.1557,
        -0.1382,
        0.0542,
        0.2813,
        0.0891,
        0.157,
        -0.0098,
        0.0375,
        -0.1825,
        -0.2246,
        -0.1207,
        -0.0698,
        0.5109,
        0.2665,
        -0.2108,
        -0.2158,
        0.2502,
        -0.2055,
        -0.0322,
        0.1109,
        0.1567,
        -0.0729,
        0.0899,
        -0.2799,
        -0.123,
        -0.0313,
        -0.1649,
        0.0117,
        0.0723,
        -0.2839,
        -0.2083,
        -0.052,
        0.3748,
        0.0152,
        0.1957,
        0.1433,
        -0.2944,
        0.3573,
        -0.0548,
        -0.1681,
        -0.0667,
    ],
    "latents_std": [
        0.4765,
        1.0364,
        0.4514,
        1.1677,
        0.5313,
        0.499,
        0.4818,
        0.5013,
        0.8158,
        1.0344,
        0.5894,
        1.0901,
        0.6885,
        0.6165,
        0.8454,
        0.4978,
        0.5759,
        0.3523,
        0.7135,
        0.6804,
        0.5833,
        1.4146,
        0.8986,
        0.5659,
        0.7069,
        0.5338,
        0.4889,
        0.4917,
        0.4069,
        0.4999,
        0.6866,
        0.4093,
        0.5709,
        0.6065,
        0.6415,
        0.4944,
        0.5726,
        1.2042,
        0.5458,
        1.6887,
        0.3971,
        1.06,
        0.3943,
        0.5537,
        0.5444,
        0.4089,
        0.7468,
        0.7744,
    ],
}
"""The VAE of the 5B."""


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


_PARTS: dict[str, Config] = {"text_encoder": UMT5_XXL, "vae": {}, "image_encoder": _CLIP_H}
_PREDICT = dict.fromkeys((card.WAN_VACE.name, card.WAN22_VACE.name), predict_with_control)
REFERENCES = {
    hub_id: Reference(
        _PREDICT.get(model.name, predict), {**_PARTS, "vae": _VAE_5B} if model is card.WAN22_5B else _PARTS
    )
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
