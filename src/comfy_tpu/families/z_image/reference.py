"""Z-Image as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.reference import Reference, decode_image, encode_image
from comfy_tpu.families.shared.small_configs import IMAGE_VAE_SMALL
from comfy_tpu.families.z_image import card


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    cfg_normalization: torch.Tensor,
) -> torch.Tensor:
    dtype = module.cap_embedder[1].weight.dtype
    rows = [row[row.any(dim=-1)] for row in text.to(dtype)]
    place = (1000 - timestep.expand(latents.shape[0])) / 1000
    velocities = module(list(latents.to(dtype).unbind(dim=0)), place, rows, return_dict=False)[0]
    return -torch.stack(list(velocities))


REFERENCES = {
    hub_id: Reference(predict, decode_image, encode_image) for model in card.CARD.models for hub_id in model.published
}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 4,
        "dim": 96,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
        "cap_feat_dim": 16,
        "axes_dims": (8, 8, 8),
    },
    "text_encoder": {
        "vocab_size": 384,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 512,
    },
    "vae": IMAGE_VAE_SMALL,
}
