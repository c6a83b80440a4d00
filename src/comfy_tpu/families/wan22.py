"""Wan 2.2: a pair of 14B transformers for high and low noise, and the 5B with a VAE of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.families import first_frame, wan, wan_image
from comfy_tpu.families.family import Config, ImageInput
from comfy_tpu.families.schedulers import own_shift

TEXT, PICTURE = "WanPipeline", "WanImageToVideoPipeline"


def _kind(index: Config) -> tuple[bool, bool]:
    """Whether a model directory has two transformers, and whether its first frame may be given as it is."""
    return index.get("boundary_ratio") is not None, bool(index.get("expand_timesteps"))


def _low_noise(spec: Any) -> Any:
    return dataclasses.replace(spec, name="transformer_2")


_A14B: Mapping[str, Any] = {**wan.PUBLISHED["Wan-AI/Wan2.1-T2V-14B-Diffusers"]}

WAN22 = dataclasses.replace(
    wan.WAN21,
    name="Wan 2.2",
    matches=lambda index, config: index.get("_class_name") == TEXT and _kind(index) == (True, False),
    transformers=(wan.TRANSFORMER, _low_noise(wan.TRANSFORMER)),
    # As the authors' own settings for this model have them. The scheduler's file is not asked for the shift: diffusers'
    # conversion writes Wan 2.1's 3.0 into it.
    defaults=dataclasses.replace(
        wan.WAN21.defaults,
        num_inference_steps=40,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        flow_shift=12.0,
        boundary=0.875,
    ),
    presets={name: {**preset, "flow_shift": 12.0} for name, preset in wan.WAN21.presets.items()},
    workload=functools.partial(wan.workload, models=2),
    published={"Wan-AI/Wan2.2-T2V-A14B-Diffusers": _A14B},
    curves={},
)

WAN21_IMAGE = dataclasses.replace(
    wan.WAN21,
    name="Wan 2.1 image-to-video",
    matches=lambda index, config: (
        index.get("_class_name") == PICTURE
        and _kind(index) == (False, False)
        and config.get("pos_embed_seq_len") is None
    ),
    pipeline_classes=(PICTURE,),
    transformers=(wan_image.TRANSFORMER,),
    embedding_shapes=wan_image.image_shapes,
    prepare=wan_image.prompt_cache,
    prepared_axes=wan_image.PROMPT_AXES,
    predict=wan_image.predict,
    image=wan_image.CLIP_IMAGE_INPUT,
    own_settings=own_shift,  # each size has a model of its own
    published={
        "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": {
            **_A14B,
            "in_channels": 36,
            "image_dim": 1280,
            "added_kv_proj_dim": 5120,
        },
    },
    curves={},
)

WAN21_FIRST_LAST = dataclasses.replace(
    WAN21_IMAGE,
    name="Wan 2.1 first and last frame",
    matches=lambda index, config: (
        index.get("_class_name") == PICTURE
        and _kind(index) == (False, False)
        and config.get("pos_embed_seq_len") is not None
    ),
    transformers=(wan_image.FIRST_AND_LAST,),
    image=wan_image.CLIP_FIRST_AND_LAST,
    published={
        "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": {
            **_A14B,
            "in_channels": 36,
            "image_dim": 1280,
            "added_kv_proj_dim": 5120,
            "pos_embed_seq_len": 514,
        },
    },
)

WAN22_IMAGE = dataclasses.replace(
    WAN22,
    name="Wan 2.2 image-to-video",
    matches=lambda index, config: index.get("_class_name") == PICTURE and _kind(index) == (True, False),
    pipeline_classes=(PICTURE,),
    defaults=dataclasses.replace(
        WAN22.defaults, guidance_scale=3.5, guidance_scale_2=3.5, flow_shift=5.0, boundary=0.9
    ),
    presets={
        "720P": {"height": 720, "width": 1280, "flow_shift": 5.0},
        "480P": {"height": 480, "width": 848, "flow_shift": 3.0},
    },
    embedding_shapes=wan_image.image_shapes,
    prepare=wan_image.prompt_cache,
    prepared_axes=wan_image.PROMPT_AXES,
    predict=wan_image.predict,
    image=wan_image.IMAGE_INPUT,
    published={"Wan-AI/Wan2.2-I2V-A14B-Diffusers": {**_A14B, "in_channels": 36}},
)


def prepare_5b(module: Any, text: torch.Tensor, condition: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    prepared = wan.prompt_cache(module, text)
    return prepared if condition is None else prepared | {"condition": condition}


def predict_5b(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """With a picture, the first latent frame is its own and has no noise: tokens of it are told timestep 0."""
    if condition is None:
        return wan.predict(module, latents, timestep, guidance_scale)
    latents = first_frame.with_first(latents, condition)
    _, height, width = module.config.patch_size
    of_a_frame = (latents.shape[3] // height) * (latents.shape[4] // width)
    noisy = torch.ones(latents.shape[2] * of_a_frame, device=latents.device)
    noisy[:of_a_frame] = 0
    return wan.predict(module, latents, noisy * timestep, guidance_scale)


WAN22_5B = dataclasses.replace(
    wan.WAN21,
    name="Wan 2.2 5B",
    matches=lambda index, config: index.get("_class_name") in (TEXT, PICTURE) and _kind(index) == (False, True),
    pipeline_classes=(TEXT, PICTURE),
    limits=dataclasses.replace(wan.WAN21.limits, size_multiple=32, size_min=32),
    defaults=dataclasses.replace(
        wan.WAN21.defaults, height=704, width=1280, num_frames=121, fps=24, flow_shift=5.0, guidance_scale=5.0
    ),
    presets={"720P": {"height": 704, "width": 1280, "flow_shift": 5.0}},
    spatial_scale=16,
    latent_channels=lambda config: int(config.get("z_dim", 48)),
    prepare=prepare_5b,
    prepared_axes={**wan.PROMPT_AXES, "condition": ("dp",)},
    predict=predict_5b,
    own_settings=own_shift,
    workload=functools.partial(wan.workload, spatial_scale=16),
    image=ImageInput(
        wan_image.encode_frames,
        first_frame.condition,
        optional=("condition",),
        first_only=True,
        finish=first_frame.finish,
    ),
    published={
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
            **_A14B,
            "num_attention_heads": 24,
            "num_layers": 30,
            "ffn_dim": 14336,
            "in_channels": 48,
            "out_channels": 48,
        },
    },
    curves={},
)
