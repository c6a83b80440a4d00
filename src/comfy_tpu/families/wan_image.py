"""Wan from pictures: the first frame, and optionally the last, as latents beside the noise and as CLIP's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families import wan
from comfy_tpu.families.building import VISION_RULES, without_vision_prefix
from comfy_tpu.families.family import Cache, Config, ImageInput
from comfy_tpu.parallel.rules import column, replicate


def _build_image_encoder(config: Config) -> torch.nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    # Wan reads what the last layer but one says, so there is no last one.
    known = CLIPVisionConfig(**config)
    known.num_hidden_layers -= 1
    return CLIPVisionModel(known)


IMAGE_ENCODER = ComponentSpec(
    name="image_encoder",
    classes=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    heads="num_attention_heads",
    build=_build_image_encoder,
    stacks=(LayerStack("encoder.layers"),),
    rename=without_vision_prefix,
    unused=("encoder.layers.*", "post_layernorm.*", "visual_projection.*", "embeddings.position_ids"),
    rules=(*VISION_RULES, replicate("pre_layrnorm.*")),
)

TRANSFORMER = dataclasses.replace(
    wan.TRANSFORMER,
    build=wan.build_transformer,
    rules=(
        *wan.TRANSFORMER.rules,
        column("blocks.*.attn2.add_[kv]_proj.*"),
        column("blocks.*.attn2.norm_added_k.weight"),
    ),
)
"""With keys and values of the picture in every cross-attention."""

FIRST_AND_LAST = dataclasses.replace(
    TRANSFORMER, rules=(*TRANSFORMER.rules, replicate("condition_embedder.image_embedder.pos_embed"))
)
"""And with a place for each of two pictures."""


def embed_image(module: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """[pictures, 3, height, width] -> {"image": [1, pictures · tokens, features]}"""
    hidden = module.pre_layrnorm(module.embeddings(pixel_values))
    tokens = module.encoder(inputs_embeds=hidden).last_hidden_state
    return {"image": tokens.flatten(0, 1).unsqueeze(0)}


def encode_frames(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, 3, 1 or 4, height, width] in -1..1 -> the transformer's latents [batch, channels, 1, …], the cache after.

    The first frame comes alone, without a cache.
    """
    moments, cache = encode_moments(module, pixels, cache)
    mean, std = (
        torch.tensor(values, device=pixels.device).view(1, -1, 1, 1, 1)
        for values in wan.latent_statistics(module.config)
    )
    return (moments.float().chunk(2, dim=1)[0] - mean) / std, cache


def encode_moments(module: Any, pixels: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """As `encode_frames`, but mean and log variance in the VAE's own scale."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    pixels = pixels.to(module.quant_conv.weight.dtype)
    if module.config.patch_size is not None:
        pixels = patchify(pixels, module.config.patch_size)
    count = sum(isinstance(part, torch.nn.Conv3d) for part in module.encoder.modules())
    slots: list[Any] = [None] * count if cache is None else list(cache)
    moments = module.encoder(pixels, feat_cache=slots, feat_idx=[0])
    return module.quant_conv(moments), slots


def prompt_cache(
    module: Any, text: torch.Tensor, condition: torch.Tensor, image: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The prompt's keys and values, CLIP's where the model reads them, and the picture's latents as they are."""
    prepared = wan.prompt_cache(module, text) | {"condition": condition}
    if image is not None:
        dtype = module.blocks.template.attn2.to_k.weight.dtype
        embedder = module.condition_embedder.image_embedder
        if embedder.pos_embed is not None:  # it would fold two pictures, which are in one row already, into one
            if image.shape[1] != embedder.pos_embed.shape[1]:  # widths are the same in all models with CLIP
                raise InvalidValueError(
                    f"the picture was encoded for another model: image has {image.shape[1]} tokens, those of a first "
                    f"and a last picture are {embedder.pos_embed.shape[1]}; encode both with this model"
                )
            image = image.unflatten(1, (2, -1)).flatten(0, 1)
        context = embedder(image.to(dtype)).to(dtype)
        keys, values = module.blocks.map(lambda block: _image_keys_and_values(block.attn2, context))
        prepared |= {"blocks.*.attn2.image_key": keys, "blocks.*.attn2.image_value": values}
    return prepared


def _image_keys_and_values(attn: Any, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key = attn.norm_added_k(attn.add_k_proj(context)).unflatten(2, (attn.heads, -1))
    return key, attn.add_v_proj(context).unflatten(2, (attn.heads, -1))


PROMPT_AXES = {
    **wan.PROMPT_AXES,
    **dict.fromkeys(("blocks.*.attn2.image_key", "blocks.*.attn2.image_value"), (None, "dp", None, "tp")),
    "condition": ("dp",),
}


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    condition: torch.Tensor,
) -> torch.Tensor:
    """The picture's latents beside the noise, as more channels."""
    return wan.predict(module, torch.cat((latents, condition.to(latents.dtype)), dim=1), timestep, guidance_scale)


def condition(frames: Sequence[torch.Tensor], pictures: int, settings: GenerationSettings) -> dict[str, torch.Tensor]:
    """The channels beside the noise: which frames are given, four by four as the VAE takes them, and all latents."""
    given = torch.zeros(settings.num_frames)
    given[0] = 1
    if pictures > 1:
        given[-1] = 1
    latents = torch.cat(tuple(frames), dim=2)
    # The first latent holds one frame, which counts for all four.
    each = torch.cat((given[:1].expand(4), given[1:])).view(-1, 4).T
    mask = each[None, :, :, None, None].expand(latents.shape[0], -1, -1, *latents.shape[3:])
    return {"condition": torch.cat((mask, latents), dim=1)}


def image_shapes(config: Config, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
    """As `wan.embedding_shapes`, with the picture's."""
    frames = (settings.num_frames - 1) // 4 + 1
    channels = config["in_channels"] - config["out_channels"]
    shapes: dict[str, tuple[int, ...]] = dict(wan.embedding_shapes(config, settings))
    shapes["condition"] = (channels, frames, settings.height // 8, settings.width // 8)
    if config.get("image_dim") is not None:
        shapes["image"] = (config.get("pos_embed_seq_len") or 257, config["image_dim"])
    return shapes


IMAGE_INPUT = ImageInput(encode_frames, condition, last=True)
CLIP_IMAGE_INPUT = ImageInput(encode_frames, condition, encoder=IMAGE_ENCODER, embed=embed_image)
CLIP_FIRST_AND_LAST = dataclasses.replace(CLIP_IMAGE_INPUT, last=True, both=True)
