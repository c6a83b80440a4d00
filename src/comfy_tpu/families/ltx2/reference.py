"""LTX-2 as diffusers runs it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.ltx2 import card
from comfy_tpu.families.reference import Reference
from comfy_tpu.families.shared.packed_sound import join_sound, split_sound


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    settings: GenerationSettings,
    text: torch.Tensor,
    audio_text: torch.Tensor,
    **inputs: torch.Tensor,
) -> torch.Tensor:
    dtype, steps = module.proj_in.weight.dtype, timestep.expand(len(latents))
    sound_tokens = card.LTX2.sound_tokens(settings)
    video, sound = split_sound(latents, card.LTX2.latent_frames(settings), sound_tokens)
    frames, height, width = video.shape[2:]
    tokens, sound_velocity = module(
        hidden_states=video.flatten(2).transpose(1, 2).to(dtype),
        audio_hidden_states=sound.to(dtype),
        encoder_hidden_states=text.to(dtype),
        audio_encoder_hidden_states=audio_text.to(dtype),
        timestep=steps,
        sigma=steps,
        num_frames=frames,
        height=height,
        width=width,
        fps=float(settings.fps),
        audio_num_frames=sound_tokens,
        use_cross_timestep=True,
        return_dict=False,
    )
    return join_sound(tokens.transpose(1, 2).unflatten(2, (frames, height, width)), sound_velocity)


REFERENCES = {hub_id: Reference(predict) for model in card.CARD.models for hub_id in model.published}
SMALL: dict[str, Config] = {
    "transformer": {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "cross_attention_dim": 128,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
        "audio_num_attention_heads": 8,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 64,
        "num_layers": 2,
        "caption_channels": 64,
    },
    "text_encoder": {
        "text_config": {
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 1024,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "connectors": {
        "caption_channels": 64,
        "text_proj_in_factor": 3,
        "video_connector_num_attention_heads": 4,
        "video_connector_attention_head_dim": 16,
        "audio_connector_num_attention_heads": 4,
        "audio_connector_attention_head_dim": 16,
    },
    "vae": {
        "latent_channels": 8,
        "block_out_channels": (8, 8, 16, 16),
        "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
    },
    "audio_vae": {"base_channels": 8, "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 16},
    "vocoder": {"in_channels": 32, "hidden_channels": 32},
}
