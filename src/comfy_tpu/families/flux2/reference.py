"""Flux.2 as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.flux2 import card
from comfy_tpu.families.flux2.vae import statistics
from comfy_tpu.families.reference import Reference, encode_image


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
) -> torch.Tensor:
    batch, _, _, height, width = latents.shape
    dtype, device = module.x_embedder.weight.dtype, latents.device

    def places(*counts: int) -> torch.Tensor:
        ids = torch.cartesian_prod(*(torch.arange(count, device=device) for count in counts))
        return ids.unsqueeze(0).expand(batch, -1, -1)

    velocity = module(
        hidden_states=latents.squeeze(2).flatten(2).transpose(1, 2).to(dtype),
        timestep=timestep.expand(batch).to(dtype) / 1000,
        guidance=guidance_scale.expand(batch).float() if module.config.guidance_embeds else None,
        encoder_hidden_states=text.to(dtype),
        txt_ids=places(1, 1, 1, text.shape[1]),
        img_ids=places(1, height, width, 1),
        return_dict=False,
    )[0]
    restored: torch.Tensor = velocity.transpose(1, 2).unflatten(2, (1, height, width))
    return restored


def decode(module: Any, latents: torch.Tensor) -> torch.Tensor:
    mean, deviation = statistics(module)
    patches = latents.squeeze(2) * deviation.to(latents.dtype) + mean.to(latents.dtype)
    x = patches.unflatten(1, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)
    pixels: torch.Tensor = module.decode(x, return_dict=False)[0]
    return pixels.unsqueeze(2)


def encode(module: Any, pixels: torch.Tensor) -> torch.Tensor:
    mean, deviation = statistics(module)
    middle = encode_image(module, pixels).squeeze(2)
    patches = middle.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    return ((patches - mean.to(middle.dtype)) / deviation.to(middle.dtype)).unsqueeze(2)


REFERENCES = {hub_id: Reference(predict, decode, encode) for model in card.CARD.models for hub_id in model.published}
_SMALL_LANGUAGE: Config = {
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 8,
        "joint_attention_dim": 48,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "text_encoder": {
        "text_config": {**_SMALL_LANGUAGE, "model_type": "mistral", "num_hidden_layers": 31, "sliding_window": None},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 4,
            "image_size": 28,
        },
    },
    "vae": {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
    },
}
