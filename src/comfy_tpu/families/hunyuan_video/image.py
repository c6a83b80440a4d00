"""HunyuanVideo-1.5 from an image: the first frame as latents beside the noise, and SigLIP's tokens before the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.hunyuan_video import transformer
from comfy_tpu.families.hunyuan_video.vae import SPATIAL_SCALE, TEMPORAL_SCALE, VAE, build_vae, split_columns
from comfy_tpu.families.media import FittedMedia, first_frame_clips
from comfy_tpu.families.model_family import Cache, MediaEncoding
from comfy_tpu.families.shared.vision_encoders import VISION_RULES, strip_vision_prefix

IMAGE_TOKENS = 729
"""Tokens of SigLIP's image of 384 pixels in patches of 14."""


def _build_image_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**{**config, "vision_use_head": False}))


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    model: Any = build_vae(config)
    for attention in model.encoder.mid_block.attentions:
        # One frame sees all of itself; diffusers writes a mask of pixels by pixels, row by row, in Python.
        attention.prepare_causal_attention_mask = lambda *_, **__: None
        attention.register_forward_hook(lambda _, __, out: split_columns(out))
    return model


IMAGE_ENCODER = ComponentSpec(
    name="image_encoder",
    classes=("SiglipVisionModel",),
    heads="num_attention_heads",
    build=_build_image_encoder,
    stacks=(LayerStack("encoder.layers"),),
    rename=strip_vision_prefix,
    unused=("head.*",),
    rules=VISION_RULES,
)

IMAGE_VAE = dataclasses.replace(VAE, build=_build_vae, unused=())


def embed_image(module: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = module.encoder(inputs_embeds=module.embeddings(pixel_values)).last_hidden_state
    return {"image": module.post_layernorm(hidden)}


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1, height, width] in -1..1 -> the transformer's latents. Only a first frame is encoded."""
    moments = module.encoder(pixels.to(module.encoder.conv_in.conv.weight.dtype))
    return moments.float().chunk(2, dim=1)[0] * module.config.scaling_factor, []


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    """The channels beside the noise: the image's latents in the first frame, zeros in the others, and a mask."""
    given = latents["video"][0]
    batch, channels, _, height, width = given.shape
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    channels_beside = torch.zeros(batch, channels + 1, frames, height, width)
    channels_beside[:, :channels, 0] = given[:, :, 0]
    channels_beside[:, channels, 0] = 1
    return {"condition": channels_beside}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    sides = settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE
    return transformer.embedding_shapes(config, settings) | {
        "image": (IMAGE_TOKENS, config["image_embed_dim"]),
        "condition": (config["in_channels"] - config["out_channels"], frames, *sides),
    }


FIRST_FRAME = MediaEncoding(
    first_frame_clips,
    condition,
    encoder=IMAGE_ENCODER,
    embed=embed_image,
    processor="feature_extractor",
)
