"""Values in which parts of small models differ from published ones, for parts that several families have."""

from __future__ import annotations

from comfy_tpu.families.card import Config

T5_SMALL: Config = {
    "vocab_size": 384,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 8,
}
"""The values in which a T5 of a small model differs."""

IMAGE_VAE_SMALL: Config = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
"""The values in which the image VAE of a small model differs."""

QWEN25_VL_TEXT_SMALL: Config = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
}
"""The values in which the language model of a small Qwen2.5-VL differs."""
