"""Small random Wan VAEs, and both ways through one: diffusers' and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from benchmarks.vae import whole_videos
from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.families.wan.nnx_vae import decoding, vae_component
from comfy_tpu.parallel.mesh import make_placement
from tests.parity import small_models
from tests.parity.small_models import SmallModel, small_model

STATISTICS: dict[str, Any] = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 1.0, 2.0]}


@functools.cache
def tiny() -> SmallModel:
    """4 frames and 4 × 4 pixels for a latent, in as few layers as there can be: for long videos."""
    config = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "scale_factor_spatial": 4,
        **STATISTICS,
    }
    return small_model(wan_vae.VAE, config, lambda: AutoencoderKLWan(**config))


def four_levels() -> SmallModel:
    return small_models.vae(4)


@functools.cache
def irregular() -> SmallModel:
    """Attention between the encoder's blocks too, another decoder than encoder, and two blocks at each level."""
    config = {
        "base_dim": 6,
        "decoder_base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [0.5, 0.25],
        "temperal_downsample": [False, True, True],
        **STATISTICS,
    }
    return small_model(wan_vae.VAE, config, lambda: AutoencoderKLWan(**config))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


def run(
    model: SmallModel, function: Callable[..., Any], mesh: str, video: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A whole video [batch, channels, frames, height, width] through a function of Flax or torchax, laid out alike."""
    by_torch = function.__module__ == whole_videos.__name__
    module: Any = whole_videos if by_torch else decoding
    channels = 1 if by_torch else -1
    axes = module.DECODE_AXES if function.__name__.startswith("decode") else module.ENCODE_AXES
    make = functools.partial(Component, wan_vae.VAE) if by_torch else vae_component
    component = make(model.config, make_placement(mesh), dtype=dtype)
    program = component.program(function, input_axes=axes)
    (name,) = axes
    weights = component.load(Checkpoint.open(model.checkpoint))
    return to_host(program(weights, **{name: video.movedim(1, channels).contiguous()})).movedim(channels, 1)
