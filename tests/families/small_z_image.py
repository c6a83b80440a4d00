"""Small random Z-Image pipelines on disk, with every piece that the real model directories have."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from tests.families import small_flux
from tests.families.small_flux import random_weights
from tests.families.small_flux2 import CHAT_TEMPLATE, LANGUAGE, chat_tokenizer
from tests.parity.small_models import temporary_directory

TRANSFORMER: dict[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 4,
    "dim": 96,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 16,
    "axes_dims": (8, 8, 8),
    "axes_lens": (256, 64, 64),
}
# As the real one's thirty, a number of heads that four devices do not divide.
SIX_HEADS = {**TRANSFORMER, "n_heads": 6, "n_kv_heads": 6, "axes_dims": (4, 6, 6)}
QWEN = {**LANGUAGE, "num_hidden_layers": 4, "tie_word_embeddings": True}


@functools.cache
def reference(variant: str) -> ZImagePipeline:
    """ "turbo", "base", or "six heads", a base model."""
    torch.manual_seed(0)
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if variant == "turbo" else 6.0),
        vae=random_weights(AutoencoderKL(**small_flux.VAE)),
        text_encoder=random_weights(Qwen3Model(Qwen3Config(**QWEN))),
        tokenizer=chat_tokenizer(CHAT_TEMPLATE, "right"),
        transformer=random_weights(ZImageTransformer2DModel(**(SIX_HEADS if variant == "six heads" else TRANSFORMER))),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory(variant: str) -> Path:
    path = temporary_directory()
    reference(variant).save_pretrained(path)
    return path
