"""Small random Wan 2.1 and 2.2 pipelines of every kind, by diffusers, and their directories."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from tests.parity import small_models
from tests.pipeline import small_pipeline

IMAGE_TOKENS = 5

_PICTURE_CHANNELS = {"in_channels": 12}  # 4 of noise, 4 that say which frames are given, 4 of those
_READS_PICTURES = {**_PICTURE_CHANNELS, "image_dim": 32, "added_kv_proj_dim": 96}

KINDS: dict[str, dict[str, Any]] = {
    "2.2": {"transformers": 2},
    "2.2 image": {"transformers": 2, "picture": True, "config": _PICTURE_CHANNELS},
    "2.1 image": {"picture": True, "clip": True, "config": _READS_PICTURES},
    "2.1 first and last": {
        "picture": True,
        "clip": True,
        "config": {**_READS_PICTURES, "pos_embed_seq_len": 2 * IMAGE_TOKENS},
    },
    "5B": {"expand": True},
    "5B image": {"expand": True, "picture": True},
}
WHOLE_LANES = "2.1 with heads of whole lanes"
"""For the kernels of the TPU; in all else as the smallest pipeline."""
_WHOLE_LANES: dict[str, Any] = {"config": {"num_attention_heads": 4, "attention_head_dim": 128}}


@functools.cache
def reference(kind: str) -> WanPipeline | WanImageToVideoPipeline:
    facts = _WHOLE_LANES if kind == WHOLE_LANES else KINDS[kind]
    parts: dict[str, Any] = {
        "tokenizer": small_pipeline.reference().tokenizer,
        "text_encoder": small_pipeline.reference().text_encoder,
        "transformer": _transformer(1, facts.get("config", {})),
        "vae": _vae_5b() if facts.get("expand") else small_pipeline.reference().vae,
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "expand_timesteps": facts.get("expand", False),
    }
    if facts.get("transformers") == 2:
        parts |= {"transformer_2": _transformer(2, facts.get("config", {})), "boundary_ratio": 0.8}
    if facts.get("clip"):
        parts |= {"image_encoder": _image_encoder(), "image_processor": _processor()}
    make = WanImageToVideoPipeline if facts.get("picture") else WanPipeline
    pipeline = make(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory(kind: str) -> Path:
    path = small_models.temporary_directory()
    reference(kind).save_pretrained(path)
    return path


def picture(seed: int, width: int = 70, height: int = 50) -> Image.Image:
    """Of another size than any video here: it has to be resized."""
    drawn = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(drawn).resize((width, height), Image.Resampling.BICUBIC)


def _transformer(seed: int, changes: dict[str, Any]) -> WanTransformer3DModel:
    return _random(seed, lambda: WanTransformer3DModel(**{**small_models.transformer().config, **changes}))


@functools.cache
def _vae_5b() -> AutoencoderKLWan:
    config = {
        "base_dim": 8,
        "decoder_base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.5, 0.7, 1.0, 2.0],
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 16,
    }
    return _random(3, lambda: AutoencoderKLWan(**config))


@functools.cache
def _image_encoder() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        image_size=28,
        patch_size=14,
        hidden_act="gelu",
    )
    return _random(4, lambda: CLIPVisionModel(config))


def _processor() -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def _random(seed: int, build: Any) -> Any:
    torch.manual_seed(seed)
    module = build().eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.ndim == 1 or not parameter.any():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases, norms and places that do something
    return module
