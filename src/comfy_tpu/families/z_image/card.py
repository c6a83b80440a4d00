"""Z-Image and Z-Image Turbo: facts."""

from __future__ import annotations

import dataclasses

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import FamilyCard, ImageInput, Limits, ModelCard, NodeSet, Words
from comfy_tpu.families.shared.published import transformer_configs

_APACHE = "Apache 2.0"

TURBO_SHIFT = 3.0
BASE_SHIFT = 6.0
"""The `shift` of the published schedulers: the only value of a model directory in which the two models differ."""

Z_IMAGE_TURBO = ModelCard(
    name="Z-Image Turbo",
    pipeline_classes=("ZImagePipeline",),
    matches_scheduler=lambda scheduler: scheduler.get("shift") != BASE_SHIFT,
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=1,
        frames_max=1,
        schedulers=("euler", "unipc", "dpm++"),
    ),
    defaults=GenerationSettings(
        height=1024,
        width=1024,
        num_frames=1,
        num_inference_steps=8,
        guidance_scale=0.0,
        flow_shift=TURBO_SHIFT,
        scheduler="euler",
    ),
    sizes={str(size): {"height": size, "width": size} for size in (512, 768, 1024, 1536)},
    spatial_scale=8,
    temporal_scale=1,
    encodes_results=True,
    published=transformer_configs(__package__, "Tongyi-MAI/Z-Image-Turbo"),
    licences={"Tongyi-MAI/Z-Image-Turbo": _APACHE},
    guidance_off=0.0,
    normalizes_guidance=True,
    image=ImageInput("initial"),
    reads_single_files=True,
)

Z_IMAGE = dataclasses.replace(
    Z_IMAGE_TURBO,
    name="Z-Image",
    matches_scheduler=lambda scheduler: scheduler.get("shift") == BASE_SHIFT,
    defaults=dataclasses.replace(
        Z_IMAGE_TURBO.defaults, num_inference_steps=50, guidance_scale=4.0, flow_shift=BASE_SHIFT
    ),
    published=transformer_configs(__package__, "Tongyi-MAI/Z-Image"),
    licences={"Tongyi-MAI/Z-Image": _APACHE},
)

CARD = FamilyCard(
    package="comfy_tpu.families.z_image",
    title="Z-Image",
    node_sets=(
        NodeSet(
            key="ZImage",
            name="Z-Image",
            category="TPU/Z-Image",
            models=(Z_IMAGE_TURBO, Z_IMAGE),
            latent_format="Flux",
            size_max=2048,
            words=Words(
                text_encoder="Z-Image's language model",
                native_text_encoder=" or from ComfyUI's CLIP Text Encode with Z-Image's encoder",
                schedulers="euler is Z-Image's own; unipc and dpm++ are multistep ones",
                languages="in English or Chinese",
                negative_prompt="Has an effect where guidance_scale is over 0.",
                guidance="How closely to follow the prompt: 0 for Turbo, 3 to 5 for the base model. At 0 the negative "
                "prompt is not used: a step computes one branch instead of two. It is one less than ComfyUI's cfg.",
                sizes="512 to 2048 on a side: 1024×1024, 1280×720, 1536×1024.",
            ),
        ),
    ),
)
