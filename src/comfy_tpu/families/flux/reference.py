"""Flux.1 as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.flux import card
from comfy_tpu.families.reference import Reference, decode_image, encode_image
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.small_configs import IMAGE_VAE_SMALL, T5_SMALL


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    pooled: torch.Tensor,
    text: torch.Tensor,
) -> torch.Tensor:
    batch, _, _, height, width = latents.shape
    dtype, device = module.x_embedder.weight.dtype, latents.device
    places = torch.zeros(height // 2, width // 2, 3, device=device, dtype=dtype)
    places[..., 1] += torch.arange(height // 2, device=device)[:, None]
    places[..., 2] += torch.arange(width // 2, device=device)[None]
    tokens = module(
        hidden_states=as_tokens(latents).to(dtype),
        timestep=timestep.expand(batch).to(dtype) / 1000,
        guidance=guidance_scale.expand(batch).float() if module.config.guidance_embeds else None,
        pooled_projections=pooled.to(dtype),
        encoder_hidden_states=text.to(dtype),
        txt_ids=torch.zeros(text.shape[1], 3, device=device, dtype=dtype),
        img_ids=places.flatten(0, 1),
        return_dict=False,
    )[0]
    return as_latents(tokens, height, width)


REFERENCES = {
    hub_id: Reference(predict, decode_image, encode_image) for model in card.CARD.models for hub_id in model.published
}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 8,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 24,
        "axes_dims_rope": (4, 6, 6),
    },
    "text_encoder": {
        "vocab_size": 384,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "projection_dim": 24,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "text_encoder_2": T5_SMALL,
    "vae": IMAGE_VAE_SMALL,
}
