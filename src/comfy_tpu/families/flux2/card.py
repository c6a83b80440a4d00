"""Flux.2 dev and klein: facts."""

from __future__ import annotations

import dataclasses

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import FamilyCard, ImageInput, Limits, ModelCard, NodeSet, Preset, Words
from comfy_tpu.families.shared.published import transformer_configs

_NON_COMMERCIAL = "FLUX Non-Commercial"

FLUX2_DEV = ModelCard(
    name="Flux.2 dev",
    pipeline_classes=("Flux2Pipeline",),
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
        num_inference_steps=50,
        guidance_scale=4.0,
        flow_shift=1.0,
        scheduler="euler",
    ),
    sizes={str(size): {"height": size, "width": size} for size in (512, 768, 1024)},
    spatial_scale=16,
    temporal_scale=1,
    encodes_results=True,
    published=transformer_configs(__package__, "black-forest-labs/FLUX.2-dev"),
    licences={"black-forest-labs/FLUX.2-dev": _NON_COMMERCIAL},
    guidance="embedded",
    presets={
        "turbo": Preset(
            {
                "num_inference_steps": 8,
                "guidance_scale": 2.5,
                "scheduler": "euler",
                "flow_shift": 1.0,
                # As the LoRA's page gives them to diffusers' pipeline, which shifts them by the image's size.
                "sigmas": "1,0.6509,0.4374,0.2932,0.1893,0.1108,0.0495,0.00031",
            },
            patterns=(r"flux[-_. ]?2.*turbo",),
            sources=("fal/FLUX.2-dev-Turbo",),
        ),
    },
    image=ImageInput("reference", max_images=4),
    reads_single_files=True,
)

FLUX2_KLEIN = dataclasses.replace(
    FLUX2_DEV,
    name="Flux.2 klein",
    pipeline_classes=("Flux2KleinPipeline",),
    matches=lambda index, config: bool(index.get("is_distilled")),
    defaults=dataclasses.replace(FLUX2_DEV.defaults, num_inference_steps=4, guidance_scale=1.0),
    published=transformer_configs(
        __package__, "black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-9B"
    ),
    licences={
        "black-forest-labs/FLUX.2-klein-4B": "Apache 2.0",
        "black-forest-labs/FLUX.2-klein-9B": _NON_COMMERCIAL,
    },
    guidance="none",
    presets={
        "4step": Preset({"num_inference_steps": 4, "scheduler": "euler", "flow_shift": 1.0}, is_distilled=True),
    },
)

FLUX2_KLEIN_BASE = dataclasses.replace(
    FLUX2_KLEIN,
    name="Flux.2 klein base",
    matches=lambda index, config: not index.get("is_distilled"),
    defaults=FLUX2_DEV.defaults,
    published=transformer_configs(
        __package__, "black-forest-labs/FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-klein-base-9B"
    ),
    licences={
        "black-forest-labs/FLUX.2-klein-base-4B": "Apache 2.0",
        "black-forest-labs/FLUX.2-klein-base-9B": _NON_COMMERCIAL,
    },
    guidance="classifier_free",
    presets={},
)

CARD = FamilyCard(
    package="comfy_tpu.families.flux2",
    title="Flux.2",
    node_sets=(
        NodeSet(
            key="Flux2",
            name="Flux.2",
            category="TPU/Flux",
            models=(FLUX2_DEV, FLUX2_KLEIN, FLUX2_KLEIN_BASE),
            latent_format="Flux2",
            pads_text=False,
            size_max=2048,
            words=Words(
                text_encoder="Flux.2's language model",
                native_text_encoder=" or from ComfyUI's CLIP Text Encode with Flux.2's encoder",
                negative_prompt="Has an effect on klein base alone, where guidance_scale is over 1.",
                schedulers="euler is Flux.2's own; unipc and dpm++ are multistep ones",
                guidance="How closely to follow the prompt: a number that dev reads, and the weight of the prompt "
                "against the negative one in klein base. It has no effect on klein.",
                sizes="About a million pixels in all: 1024×1024, 1152×896, 1344×768.",
            ),
        ),
    ),
)
