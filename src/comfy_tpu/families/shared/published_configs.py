"""Published configurations of encoders that several families have. Torch is not imported."""

from __future__ import annotations

from comfy_tpu.families.card import Config

T5_XXL: Config = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
UMT5_XXL: Config = {**T5_XXL, "vocab_size": 256384}
CLIP_L: Config = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}

T5_SMALL: Config = {
    "vocab_size": 384,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 8,
}
"""The values in which a T5 of a small model differs."""
