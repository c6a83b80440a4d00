"""Wan from images: the first frame, and optionally the last, as latents beside the noise and as CLIP's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import Clips, FittedMedia, first_frame_clips, gray_video
from comfy_tpu.families.model_family import MediaEncoding
from comfy_tpu.families.shared import first_frame
from comfy_tpu.families.shared.vision_encoders import VISION_RULES, strip_vision_prefix
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan import transformer
from comfy_tpu.families.wan.vae import TEMPORAL_SCALE
from comfy_tpu.parallel.rules import column, replicate


def _build_image_encoder(config: Config) -> torch.nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    # Wan reads the output of the last layer but one, so the last layer is left out.
    known = CLIPVisionConfig(**config)
    known.num_hidden_layers -= 1
    return CLIPVisionModel(known)


IMAGE_ENCODER = ComponentSpec(
    name="image_encoder",
    classes=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    heads="num_attention_heads",
    build=_build_image_encoder,
    stacks=(LayerStack("encoder.layers"),),
    rename=strip_vision_prefix,
    unused=("encoder.layers.*", "post_layernorm.*", "visual_projection.*", "embeddings.position_ids"),
    rules=(*VISION_RULES, replicate("pre_layrnorm.*")),
)

TRANSFORMER = dataclasses.replace(
    transformer.TRANSFORMER,
    build=transformer.build_transformer,
    rules=(
        *transformer.TRANSFORMER.rules,
        column("blocks.*.attn2.add_[kv]_proj.*"),
        column("blocks.*.attn2.norm_added_k.weight"),
    ),
)
"""The transformer with keys and values of the image in every cross-attention."""

FIRST_AND_LAST = dataclasses.replace(
    TRANSFORMER, rules=(*TRANSFORMER.rules, replicate("condition_embedder.image_embedder.pos_embed"))
)
"""The transformer with position embeddings for two images."""


def embed_image(module: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """[images, 3, height, width] -> {"image": [1, images · tokens, features]}"""
    hidden = module.pre_layrnorm(module.embeddings(pixel_values))
    tokens = module.encoder(inputs_embeds=hidden).last_hidden_state
    return {"image": tokens.flatten(0, 1).unsqueeze(0)}


def prompt_cache(
    module: Any,
    text: torch.Tensor,
    condition: torch.Tensor,
    image: torch.Tensor | None = None,
    padding_count: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The prompt's keys and values, those of CLIP's tokens if the model reads them, and the image's latents."""
    prepared = transformer.prompt_cache(module, text, padding_count) | {"condition": condition}
    if image is not None:
        dtype = module.blocks.template.attn2.to_k.weight.dtype
        embedder = module.condition_embedder.image_embedder
        if embedder.pos_embed is not None:  # it would fold two images, which are in one row already, into one
            if image.shape[1] != embedder.pos_embed.shape[1]:  # widths are the same in all models with CLIP
                raise InvalidValueError(
                    f"the image was encoded for another model: image has {image.shape[1]} tokens, those of a first "
                    f"and a last image are {embedder.pos_embed.shape[1]}; encode both with this model"
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
    **transformer.PROMPT_AXES,
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
    """The velocity; the image's latents are channels beside the noise."""
    channels = torch.cat((latents, condition.to(latents.dtype)), dim=1)
    return transformer.predict(module, channels, timestep, guidance_scale)


def clips(media: FittedMedia, settings: GenerationSettings, config: Config) -> Clips:
    """The video that is gray but for its first frame, and perhaps its last."""
    return {"video": gray_video(media.images, settings, TEMPORAL_SCALE)}


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    """The channels beside the noise: a mask of the given frames, four per latent, and the latents of all frames."""
    given = torch.zeros(settings.num_frames)
    given[0] = 1
    if len(media.images) > 1:
        given[-1] = 1
    frames = torch.cat(tuple(latents["video"]), dim=2)
    # The first latent holds one frame, which counts for all four.
    each = torch.cat((given[:1].expand(4), given[1:])).view(-1, 4).T
    mask = each[None, :, :, None, None].expand(frames.shape[0], -1, -1, *frames.shape[3:])
    return {"condition": torch.cat((mask, frames), dim=1)}


def image_shapes(config: Config, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
    """The shapes of `text.embedding_shapes`, and those of the image's embeddings."""
    frames = (settings.num_frames - 1) // 4 + 1
    channels = config["in_channels"] - config["out_channels"]
    shapes: dict[str, tuple[int, ...]] = dict(wan_text.embedding_shapes(config, settings))
    shapes["condition"] = (channels, frames, settings.height // 8, settings.width // 8)
    if config.get("image_dim") is not None:
        shapes["image"] = (config.get("pos_embed_seq_len") or 257, config["image_dim"])
    return shapes


LATENT_ENCODING = MediaEncoding(clips, condition)
LATENT_AND_CLIP_ENCODING = dataclasses.replace(LATENT_ENCODING, encoder=IMAGE_ENCODER, embed=embed_image)
FIRST_FRAME_ENCODING = MediaEncoding(
    first_frame_clips,
    first_frame.condition,
    optional_embeddings=("condition",),
    finish=first_frame.finish,
)
"""The encoding of the 5B, whose first latent frame is the image's own."""


def prepare_first_frame(
    module: Any,
    text: torch.Tensor,
    condition: torch.Tensor | None = None,
    padding_count: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    prepared = transformer.prompt_cache(module, text, padding_count)
    return prepared if condition is None else prepared | {"condition": condition}


def predict_first_frame(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """The velocity. With an image, the first latent frame is the image's and has no noise: its tokens have timestep
    0."""
    if condition is None:
        return transformer.predict(module, latents, timestep, guidance_scale)
    latents = first_frame.replace_first_frame(latents, condition)
    _, height, width = module.config.patch_size
    frame_tokens = (latents.shape[3] // height) * (latents.shape[4] // width)
    noisy = torch.ones(latents.shape[2] * frame_tokens, device=latents.device)
    noisy[:frame_tokens] = 0
    return transformer.predict(module, latents, noisy * timestep, guidance_scale)
