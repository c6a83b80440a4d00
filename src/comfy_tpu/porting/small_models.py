"""Sizes and inputs of diffusers' models where names do not tell: layouts of their own, sizes that belong together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Known:
    config: Mapping[str, Any]
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """As `--inputs` has them; none: they can be guessed."""


_TIME = {"value": [500], "dtype": "int64"}
_MASK = {"shape": [1, 7], "dtype": "bool"}

SMALL_MODELS: dict[str, Known] = {
    "CogVideoXTransformer3DModel": Known(
        {"num_attention_heads": 2, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 16, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 9, "max_text_seq_length": 7},
        {"hidden_states": [1, 3, 16, 8, 8], "encoder_hidden_states": [1, 7, 32], "timestep": _TIME},
    ),
    "MochiTransformer3DModel": Known(
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "pooled_projection_dim": 32}
        | {"text_embed_dim": 32, "time_embed_dim": 16, "max_sequence_length": 7},
        {"hidden_states": [1, 12, 2, 8, 8], "encoder_hidden_states": [1, 7, 32], "timestep": _TIME}
        | {"encoder_attention_mask": _MASK},
    ),
    "CogView4Transformer2DModel": Known(
        {"num_attention_heads": 2, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8}
        | {"rope_axes_dim": [8, 8], "sample_size": 8},
        {"hidden_states": [1, 16, 8, 8], "encoder_hidden_states": [1, 7, 32], "timestep": _TIME}
        | {"original_size": [1, 2], "target_size": [1, 2], "crop_coords": [1, 2]},
    ),
    "SanaTransformer2DModel": Known(
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_cross_attention_heads": 2}
        | {"cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8},
    ),
    "AllegroTransformer3DModel": Known(
        {"num_attention_heads": 2, "num_layers": 2, "cross_attention_dim": 192, "caption_channels": 32}
        | {"sample_height": 8, "sample_width": 8, "sample_frames": 4},
        {"hidden_states": [1, 4, 4, 8, 8], "encoder_hidden_states": [1, 1, 7, 32], "timestep": _TIME}
        | {"attention_mask": [1, 4, 8, 8], "encoder_attention_mask": [1, 1, 7]},
    ),
    "CosmosTransformer3DModel": Known(
        {"num_attention_heads": 2, "num_layers": 2, "text_embed_dim": 32, "adaln_lora_dim": 8, "max_size": [4, 16, 16]},
        {"hidden_states": [1, 16, 2, 8, 8], "timestep": [1], "encoder_hidden_states": [1, 7, 32]}
        | {"fps": 16, "padding_mask": [1, 1, 8, 8]},
    ),
    "Lumina2Transformer2DModel": Known(
        {"hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1}
        | {"axes_dim_rope": [16, 16, 16], "axes_lens": [32, 32, 32], "cap_feat_dim": 32, "sample_size": 8},
        {"hidden_states": [1, 16, 8, 8], "timestep": [1], "encoder_hidden_states": [1, 7, 32]}
        | {"encoder_attention_mask": _MASK},
    ),
    "ZImageTransformer2DModel": Known(
        {"dim": 96, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32}
        | {"axes_dims": [16, 16, 16], "axes_lens": [64, 32, 32]},
        {"x": [{"shape": [16, 1, 8, 8]}], "t": [1], "cap_feats": [{"shape": [7, 32]}]},
    ),
    "StableAudioDiTModel": Known(
        {"num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 2, "num_key_value_attention_heads": 1}
        | {"sample_size": 16, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "time_proj_dim": 16}
        | {"global_states_input_dim": 32, "cross_attention_input_dim": 32},
        {"hidden_states": [1, 8, 16], "timestep": [1], "encoder_hidden_states": [1, 7, 32]}
        | {"global_hidden_states": [1, 1, 32]},
    ),
    "LatteTransformer3DModel": Known(
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "patch_size": 2}
        | {"num_layers": 2, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8, "video_length": 2}
        | {"num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False},
        {"hidden_states": [1, 4, 2, 8, 8], "timestep": _TIME, "encoder_hidden_states": [1, 7, 32]},
    ),
    "PixArtTransformer2DModel": Known(
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "cross_attention_dim": 32}
        | {"caption_channels": 32, "sample_size": 8, "use_additional_conditions": False},
        {"hidden_states": [1, 4, 8, 8], "encoder_hidden_states": [1, 7, 32], "timestep": _TIME},
    ),
    "HunyuanDiT2DModel": Known(
        {"num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 32, "in_channels": 4, "patch_size": 2}
        | {"num_layers": 4, "sample_size": 8, "cross_attention_dim": 32, "cross_attention_dim_t5": 16}
        | {"pooled_projection_dim": 16, "text_len": 7, "text_len_t5": 5, "activation_fn": "gelu-approximate"},
        {"hidden_states": [1, 4, 8, 8], "timestep": [1], "encoder_hidden_states": [1, 7, 32]}
        | {"text_embedding_mask": [1, 7], "encoder_hidden_states_t5": [1, 5, 16], "text_embedding_mask_t5": [1, 5]}
        | {"image_meta_size": [1, 6], "style": {"shape": [1], "dtype": "int64"}}
        | {"image_rotary_emb": [{"shape": [16, 16]}, {"shape": [16, 16]}]},
    ),
    "HunyuanVideo15Transformer3DModel": Known(
        {"in_channels": 8, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
        | {"num_refiner_layers": 1, "text_embed_dim": 32, "text_embed_2_dim": 16, "image_embed_dim": 16}
        | {"rope_axes_dim": [4, 6, 6], "target_size": 16},
        {"hidden_states": [1, 8, 2, 8, 8], "timestep": [1], "encoder_hidden_states": [1, 7, 32]}
        | {"encoder_attention_mask": _MASK, "encoder_hidden_states_2": [1, 5, 16]}
        | {"encoder_attention_mask_2": {"shape": [1, 5], "dtype": "bool"}, "image_embeds": [1, 4, 16]},
    ),
    "UNet2DConditionModel": Known(
        {"block_out_channels": [32, 64], "layers_per_block": 1, "cross_attention_dim": 32, "sample_size": 8}
        | {"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "attention_head_dim": 8}
        | {"up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]},
        {"sample": [1, 4, 8, 8], "timestep": _TIME, "encoder_hidden_states": [1, 7, 32]},
    ),
    "UNet2DModel": Known(
        {"block_out_channels": [32, 64], "layers_per_block": 1, "sample_size": 8}
        | {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]},
        {"sample": [1, 3, 8, 8], "timestep": _TIME},
    ),
    "PriorTransformer": Known(
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 32, "num_embeddings": 7},
        {"hidden_states": [1, 32], "timestep": _TIME, "proj_embedding": [1, 32], "encoder_hidden_states": [1, 7, 32]},
    ),
    "AutoencoderKLTemporalDecoder": Known({}, {"z": [2, 4, 8, 8], "num_frames": 2}),
    "AutoencoderKLMochi": Known(
        {"encoder_block_out_channels": [32, 32, 32, 32], "decoder_block_out_channels": [32, 32, 32, 32]}
        | {"layers_per_block": [1, 1, 1, 1, 1]},
    ),
    "AutoencoderKLCosmos": Known(
        {"encoder_block_out_channels": [32, 32, 32, 32], "decode_block_out_channels": [32, 32, 32, 32]}
        | {"num_layers": 1, "resolution": 64, "attention_resolutions": [8]},
    ),
    "AutoencoderDC": Known(
        {"encoder_block_out_channels": [32, 32], "decoder_block_out_channels": [32, 32], "latent_channels": 8}
        | {"encoder_layers_per_block": [1, 1], "decoder_layers_per_block": [1, 1]}
        | {"encoder_block_types": ["ResBlock", "EfficientViTBlock"]}
        | {"decoder_block_types": ["ResBlock", "EfficientViTBlock"]}
        | {"encoder_qkv_multiscales": [[], [5]], "decoder_qkv_multiscales": [[], [5]], "attention_head_dim": 8},
    ),
    "AutoencoderOobleck": Known(
        {"encoder_hidden_size": 16, "decoder_channels": 16, "decoder_input_channels": 8, "downsampling_ratios": [2, 4]}
        | {"channel_multiples": [1, 2]},
    ),
    "HiDreamImageTransformer2DModel": Known(
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1}
        | {"attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [32, 16], "text_emb_dim": 64}
        | {"axes_dims_rope": [4, 2, 2], "max_resolution": [32, 32], "llama_layers": [0, 1]},
        {"hidden_states": [2, 4, 32, 32], "timesteps": {"value": [500, 500], "dtype": "int64"}}
        | {"encoder_hidden_states_t5": [2, 8, 32], "encoder_hidden_states_llama3": [2, 2, 8, 16]}
        | {"pooled_embeds": [2, 64]},
    ),
}
