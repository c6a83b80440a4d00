"""The usual names of linear layers, by which tensor parallelism splits them in the same way in every model."""

from __future__ import annotations

COLUMN = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "q_proj", "k_proj", "v_proj"),
    *("to_qkv", "to_kv", "qkv", "net.0.proj", "fc1", "gate_proj", "up_proj", "w1", "w3", "linear_in", "proj_mlp"),
    *("linear_1", "linear_2"),  # of a gated feed-forward, which ends in out_projection
)
"""Layers whose outputs are split."""
ROW = (
    *("to_out.0", "to_out", "to_add_out", "o_proj", "net.2", "fc2", "down_proj", "w2", "linear_out", "out_projection"),
)
"""Layers whose inputs are split."""


def is_column(layer: str) -> bool:
    """`layer`: the path of a module."""
    return f".{layer}".endswith(tuple(f".{name}" for name in COLUMN))


def is_row(layer: str) -> bool:
    return f".{layer}".endswith(tuple(f".{name}" for name in ROW))
