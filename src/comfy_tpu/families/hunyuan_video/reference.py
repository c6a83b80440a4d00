"""HunyuanVideo-1.5 as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.hunyuan_video import card
from comfy_tpu.families.hunyuan_video.image import IMAGE_TOKENS
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.small_configs import QWEN25_VL_TEXT_SMALL


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    glyph: torch.Tensor,
    glyph_mask: torch.Tensor,
    image: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    config, dtype = module.config, module.proj_out.weight.dtype
    batch, channels, *sizes = latents.shape
    device = latents.device
    if condition is None:
        condition = torch.zeros(batch, config.in_channels - channels, *sizes, device=device)
    if image is None:
        image = torch.zeros(batch, IMAGE_TOKENS, config.image_embed_dim, device=device)
    velocity: torch.Tensor = module(
        hidden_states=torch.cat((latents.to(dtype), condition.to(dtype)), dim=1),
        timestep=timestep.expand(batch).to(dtype),
        encoder_hidden_states=text.to(dtype),
        encoder_attention_mask=text_mask.squeeze(-1),
        encoder_hidden_states_2=glyph.to(dtype),
        encoder_attention_mask_2=glyph_mask.squeeze(-1),
        image_embeds=image.to(dtype),
        return_dict=False,
    )[0]
    return velocity


REFERENCES = {hub_id: Reference(predict) for model in card.CARD.models for hub_id in model.published}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 8,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 48,
        "text_embed_2_dim": 24,
        "image_embed_dim": 16,
        "rope_axes_dim": (4, 4, 4),
        "target_size": 64,
    },
    "text_encoder": QWEN25_VL_TEXT_SMALL,
    "vae": {"latent_channels": 4, "block_out_channels": (8, 8, 16, 16, 16), "layers_per_block": 1},
    "text_encoder_2": {"vocab_size": 384, "d_model": 24, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}
