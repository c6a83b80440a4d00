"""Small random models of the real architectures, and their checkpoints on disk."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan import transformer as wan_transformer
from comfy_tpu.families.wan import vae as wan_vae


@dataclasses.dataclass(frozen=True)
class SmallModel:
    spec: ComponentSpec
    config: Mapping[str, Any]
    reference: torch.nn.Module
    """float32; its weights are rounded to bfloat16, so that both precisions start from the same numbers."""
    checkpoint: Path


def temporary_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="comfy-tpu-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def small_model(spec: ComponentSpec, config: Mapping[str, Any], build: Callable[[], torch.nn.Module]) -> SmallModel:
    torch.manual_seed(0)
    reference = build().eval().requires_grad_(False)
    for parameter in reference.parameters():
        if parameter.ndim == 1 or not parameter.any():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms that do something
        parameter.copy_(parameter.bfloat16())
    directory = temporary_directory()
    reference.save_pretrained(directory, max_shard_size="100KB")
    return SmallModel(spec, config, reference, directory)


@functools.cache
def transformer() -> SmallModel:
    config = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 8,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    return small_model(wan_transformer.TRANSFORMER, config, lambda: WanTransformer3DModel(**config))


@functools.cache
def text_encoder(d_model: int = 32) -> SmallModel:
    config = {
        "vocab_size": 96,
        "d_model": d_model,
        "d_kv": 4,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 8,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return small_model(wan_text.TEXT_ENCODER, config, lambda: UMT5EncoderModel(UMT5Config(**config)))


@functools.cache
def vae(levels: int = 3) -> SmallModel:
    """Three levels take 4 × 4 pixels and 2 frames for a latent, four take 8 × 8 and 4 as the real one does."""
    config = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2, 2][:levels],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False, True, True][: levels - 1],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.5, 0.7, 1.0, 2.0],
        "scale_factor_temporal": 2 ** (levels - 2),
        "scale_factor_spatial": 2 ** (levels - 1),
    }
    return small_model(wan_vae.VAE, config, lambda: AutoencoderKLWan(**config))
