"""A small random LTX-Video on disk, with every piece that the real model directory has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel

from comfy_tpu.families.ltx_video import transformer as ltx_transformer
from comfy_tpu.families.ltx_video import vae as ltx_vae
from comfy_tpu.families.shared.text_encoders import t5_component
from tests.families.small_flux import T5, t5_tokenizer
from tests.parity.small_models import SmallModel, small_model, temporary_directory

TEXT_TOKENS = 16
HEADS, HEAD_DIM, TEXT = 8, 14, 16
HIDDEN = HEADS * HEAD_DIM
"""112, which six does not divide: as 2048, four features are not turned by RoPE."""

VAE: dict[str, Any] = {
    "latent_channels": 6,
    "block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 8, 16, 16),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "scaling_factor": 0.9,
}


@functools.cache
def transformer() -> SmallModel:
    config = {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_DIM,
        "cross_attention_dim": HIDDEN,
        "num_layers": 3,
        "caption_channels": TEXT,
    }
    return small_model(ltx_transformer.TRANSFORMER, config, lambda: LTXVideoTransformer3DModel(**config))


@functools.cache
def text_encoder() -> SmallModel:
    return small_model(t5_component("text_encoder"), T5, lambda: T5EncoderModel(T5Config(**T5)))


@functools.cache
def vae(*, conditioned: bool = False) -> SmallModel:
    """`conditioned`: told how much noise is left, with the upsampling that came with it."""
    config = dict(VAE)
    if conditioned:
        config |= {
            "decoder_block_out_channels": (8, 16, 32),
            "decoder_layers_per_block": (1, 1, 1, 1),
            "decoder_spatio_temporal_scaling": (True, True, True),
            "decoder_inject_noise": (False, False, False, False),
            "upsample_residual": (True, True, True),
            "upsample_factor": (2, 2, 2),
            "timestep_conditioning": True,
        }

    def build() -> AutoencoderKLLTXVideo:
        model = AutoencoderKLLTXVideo(**config)
        model.latents_mean.copy_(torch.linspace(-0.5, 0.5, 6).bfloat16())
        model.latents_std.copy_(torch.linspace(0.5, 1.5, 6).bfloat16())
        return model

    return small_model(ltx_vae.VAE, config, build)


def scheduler(**changed: Any) -> FlowMatchEulerDiscreteScheduler:
    """With lengths about those of the tests, so that sizes have different shifts."""
    config = {"base_image_seq_len": 4, "max_image_seq_len": 64, "base_shift": 0.95, "max_shift": 2.05}
    return FlowMatchEulerDiscreteScheduler(
        **{**config, "use_dynamic_shifting": True, "shift_terminal": 0.1, "invert_sigmas": False, **changed}
    )


@functools.cache
def reference(*, conditioned: bool = False) -> LTXPipeline:
    pipeline = LTXPipeline(
        scheduler=scheduler(),
        vae=vae(conditioned=conditioned).reference,
        text_encoder=text_encoder().reference,
        tokenizer=t5_tokenizer(),
        transformer=transformer().reference,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def image_reference() -> LTXImageToVideoPipeline:
    pipeline = LTXImageToVideoPipeline(**reference().components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory(*, conditioned: bool = False) -> Path:
    path = temporary_directory()
    reference(conditioned=conditioned).save_pretrained(path)
    return path
