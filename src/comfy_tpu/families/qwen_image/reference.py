"""Qwen-Image as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.qwen_image import card
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.small_configs import QWEN25_VL_TEXT_SMALL


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    **references: torch.Tensor,
) -> torch.Tensor:
    batch, _, _, height, width = latents.shape
    dtype, images = module.img_in.weight.dtype, [latents, *(references[name] for name in sorted(references))]
    tokens = module(
        hidden_states=torch.cat([as_tokens(image.to(dtype)) for image in images], dim=1),
        timestep=timestep.expand(batch).to(dtype) / 1000,
        encoder_hidden_states=text.to(dtype),
        encoder_hidden_states_mask=text.any(dim=-1),
        img_shapes=[[(1, image.shape[3] // 2, image.shape[4] // 2) for image in images]] * batch,
        return_dict=False,
    )[0]
    return as_latents(tokens[:, : height * width // 4], height, width)


REFERENCES = {hub_id: Reference(predict) for model in card.CARD.models for hub_id in model.published}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 8,
        "joint_attention_dim": 48,
        "axes_dims_rope": (4, 6, 6),
    },
    "text_encoder": {
        "text_config": QWEN25_VL_TEXT_SMALL,
        "vision_config": {
            "depth": 8,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 48,
            "fullatt_block_indexes": [7],
        },
    },
    "vae": {
        "base_dim": 8,
        "z_dim": 4,
        "num_res_blocks": 1,
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    },
}
