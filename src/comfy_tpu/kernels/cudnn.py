"""NVIDIA GPUs: cuDNN's flash attention through jax.nn.

Checked on an H200 (jax 0.11.2, bfloat16) against a float32 softmax for ragged lengths, GQA, head sizes 8 to 256, causal
with more keys and with more queries (aligned top-left, as torch), left windows and key lengths, alone and combined:
largest relative error 3.4e-3. Windows with more queries than keys are refused by cuDNN itself.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
from jax import Array

from comfy_tpu.kernels.masking import Masking, show_first


def is_installed() -> bool:
    """Whether JAX can trace a cuDNN call here: it asks the CUDA plugin for cuDNN's version, also when only lowering."""
    return any(importlib.util.find_spec(name) is not None for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def cudnn_attention(query: Array, key: Array, value: Array, masking: Masking, *, scale: float) -> Array:
    """[B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, D] -> [B, Hq, Lq, D]. choice.py lists the calls that it takes."""
    # cuDNN knows lengths, and otherwise only a score-sized bias.
    key, value, lengths = show_first(key, value, masking)
    band = masking.band
    out = jax.nn.dot_product_attention(
        query.swapaxes(1, 2),
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        scale=scale,
        is_causal=band.right == 0,
        # Nothing says what cuDNN does with a length of 0; sequences without keys are made zero below, as in torch.
        key_value_seq_lengths=None if lengths is None else jnp.maximum(lengths, 1),
        local_window_size=None if band.left is None else (band.left, 0),
        implementation="cudnn",
    ).swapaxes(1, 2)
    if lengths is not None:
        out = jnp.where((lengths > 0)[:, None, None, None], out, 0)
    return out
