"""What the image encoders of transformers (CLIP, SigLIP) have in common."""

from __future__ import annotations

from comfy_tpu.parallel.rules import Rule, column, replicate, row

VISION_RULES: tuple[Rule, ...] = (
    column("encoder.layers.*.self_attn.[qkv]_proj.*"),
    row("encoder.layers.*.self_attn.out_proj.weight"),
    replicate("encoder.layers.*.self_attn.out_proj.bias"),
    column("encoder.layers.*.mlp.fc1.*"),
    row("encoder.layers.*.mlp.fc2.weight"),
    replicate("encoder.layers.*.mlp.fc2.bias"),
    replicate("encoder.layers.*.layer_norm[12].*"),
    replicate("embeddings.*"),
    replicate("post_layernorm.*"),
)
"""Sharding rules."""


def strip_vision_prefix(name: str) -> str:
    """The name of a weight without the prefix that transformers before 5 put before it."""
    return name.removeprefix("vision_model.")
