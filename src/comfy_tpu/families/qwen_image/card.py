"""Qwen-Image, Qwen-Image-Edit and its later versions with several images: facts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import FamilyCard, ImageInput, Limits, ModelCard, NodeSet, Words
from comfy_tpu.families.shared.published import transformer_configs

_APACHE = "Apache 2.0"


_NEGATIVE_PROMPTS = json.loads(Path(__file__).with_name("negative_prompts.json").read_text(encoding="utf-8"))
"""Those in Qwen's instructions, in Chinese."""

RESULT_AREA = 1024 * 1024
"""The pixels of what Edit makes, and of the images that its VAE reads."""

QWEN_IMAGE = ModelCard(
    name="Qwen-Image",
    pipeline_classes=("QwenImagePipeline",),
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=1,
        frames_max=1,
        schedulers=("euler", "unipc", "dpm++"),
        tokens_max=1024,
    ),
    defaults=GenerationSettings(
        height=1024,
        width=1024,
        num_frames=1,
        num_inference_steps=50,
        guidance_scale=4.0,
        flow_shift=1.0,
        scheduler="euler",
        negative_prompt=" ",
    ),
    sizes={str(size): {"height": size, "width": size} for size in (512, 768, 1024, 1328)},
    spatial_scale=8,
    temporal_scale=1,
    encodes_results=True,
    own_defaults={"Qwen/Qwen-Image-2512": {"negative_prompt": _NEGATIVE_PROMPTS["Qwen-Image-2512"]}},
    published=transformer_configs(__package__, "Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
    licences={"Qwen/Qwen-Image": _APACHE, "Qwen/Qwen-Image-2512": _APACHE},
    image=ImageInput("initial"),
    reads_single_files=True,
)

QWEN_IMAGE_EDIT = dataclasses.replace(
    QWEN_IMAGE,
    name="Qwen-Image-Edit",
    pipeline_classes=("QwenImageEditPipeline",),
    own_defaults={},
    published=transformer_configs(__package__, "Qwen/Qwen-Image-Edit"),
    licences={"Qwen/Qwen-Image-Edit": _APACHE},
    image=ImageInput("reference", required=True, seen_by_text_encoder=True, result_area=RESULT_AREA),
)

QWEN_IMAGE_EDIT_PLUS = dataclasses.replace(
    QWEN_IMAGE_EDIT,
    name="Qwen-Image-Edit Plus",
    pipeline_classes=("QwenImageEditPlusPipeline",),
    defaults=dataclasses.replace(QWEN_IMAGE.defaults, num_inference_steps=40),
    published=transformer_configs(__package__, "Qwen/Qwen-Image-Edit-2511", "Qwen/Qwen-Image-Edit-2509"),
    licences={"Qwen/Qwen-Image-Edit-2511": _APACHE, "Qwen/Qwen-Image-Edit-2509": _APACHE},
    image=ImageInput("reference", required=True, max_images=4, seen_by_text_encoder=True, result_area=RESULT_AREA),
)

_WORDS = Words(
    text_encoder="Qwen2.5-VL",
    native_text_encoder=" or from ComfyUI's CLIP Text Encode with Qwen-Image's encoder",
    schedulers="euler is Qwen-Image's own; unipc and dpm++ are multistep ones",
    languages="in English or Chinese",
    sizes="About a million pixels or more in all: 1024×1024, 1328×1328, 1664×928.",
)

CARD = FamilyCard(
    package="comfy_tpu.families.qwen_image",
    title="Qwen-Image",
    node_sets=(
        NodeSet(
            key="QwenImage",
            name="Qwen-Image",
            category="TPU/Qwen-Image",
            models=(QWEN_IMAGE,),
            latent_format="Wan21",
            size_max=2048,
            words=_WORDS,
        ),
        NodeSet(
            key="QwenImageEdit",
            name="Qwen-Image-Edit",
            category="TPU/Qwen-Image",
            models=(QWEN_IMAGE_EDIT_PLUS, QWEN_IMAGE_EDIT),
            latent_format="Wan21",
            size_max=2048,
            words=dataclasses.replace(
                _WORDS, native_text_encoder="", references="It is scaled to about a million pixels."
            ),
        ),
    ),
)
