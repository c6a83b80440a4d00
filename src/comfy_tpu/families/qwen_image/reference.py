"""Qwen-Image as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.qwen_image import card
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.published_configs import QWEN25_VL_TEXT, QWEN25_VL_TEXT_SMALL

_QWEN_VL: Config = {
    "text_config": QWEN25_VL_TEXT,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "image_token_id": 151655,
    "tie_word_embeddings": False,
}
_VAE: Config = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    # As of Wan 2.1.
    "latents_mean": [
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ],
    "latents_std": [
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ],
}


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


_PARTS: dict[str, Config] = {"text_encoder": _QWEN_VL, "vae": _VAE}
REFERENCES = {hub_id: Reference(predict, _PARTS) for model in card.CARD.models for hub_id in model.published}
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
