"""Flux.1 dev and schnell: facts."""

from __future__ import annotations

import dataclasses

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import FamilyCard, ImageInput, Limits, ModelCard, NodeSet, Preset, Words
from comfy_tpu.families.shared.published import transformer_configs

FLUX_DEV = ModelCard(
    name="Flux.1 dev",
    pipeline_classes=("FluxPipeline",),
    matches=lambda index, config: bool(config.get("guidance_embeds")),
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
        num_inference_steps=28,
        guidance_scale=3.5,
        flow_shift=1.0,
        scheduler="euler",
    ),
    sizes={str(size): {"height": size, "width": size} for size in (512, 768, 1024)},
    spatial_scale=8,
    temporal_scale=1,
    encodes_results=True,
    published=transformer_configs(__package__, "black-forest-labs/FLUX.1-dev"),
    licences={"black-forest-labs/FLUX.1-dev": "FLUX.1 [dev] Non-Commercial"},
    guidance="embedded",
    presets={
        "turbo": Preset(
            {"num_inference_steps": 8, "guidance_scale": 3.5, "scheduler": "euler", "flow_shift": 1.0},
            patterns=(r"turbo[-_. ]?alpha", r"flux.*turbo"),
            sources=("alimama-creative/FLUX.1-Turbo-Alpha",),
        ),
        **{
            f"{steps}step": Preset(
                {"num_inference_steps": steps, "guidance_scale": 3.5, "scheduler": "euler", "flow_shift": 1.0},
                patterns=(rf"hyper[-_ ]?flux.*(?<!\d){steps}[-_ ]?steps?(?![a-z])",),
                sources=(f"ByteDance/Hyper-SD/Hyper-FLUX.1-dev-{steps}steps-lora.safetensors",),
                lora_strength=0.125,
            )
            for steps in (8, 16)
        },
    },
    image=ImageInput("initial"),
    reads_single_files=True,
)

FLUX_SCHNELL = dataclasses.replace(
    FLUX_DEV,
    name="Flux.1 schnell",
    matches=lambda index, config: not config.get("guidance_embeds"),
    defaults=dataclasses.replace(FLUX_DEV.defaults, num_inference_steps=4, guidance_scale=0.0, max_sequence_length=256),
    published=transformer_configs(__package__, "black-forest-labs/FLUX.1-schnell"),
    licences={"black-forest-labs/FLUX.1-schnell": "Apache 2.0"},
    guidance="none",
    presets={
        "4step": Preset({"num_inference_steps": 4, "scheduler": "euler", "flow_shift": 1.0}, is_distilled=True),
    },
)

CARD = FamilyCard(
    package="comfy_tpu.families.flux",
    title="Flux.1",
    node_sets=(
        NodeSet(
            key="Flux",
            name="Flux",
            category="TPU/Flux",
            models=(FLUX_DEV, FLUX_SCHNELL),
            latent_format="Flux",
            conditioning_keys={"pooled": "pooled_output"},
            pads_text=False,
            size_max=2048,
            words=Words(
                text_encoder="Flux's CLIP and T5 encoders",
                native_text_encoder=" or from ComfyUI's CLIP Text Encode with Flux's encoders",
                schedulers="euler is Flux's own; unipc and dpm++ are multistep ones",
                guidance="How closely to follow the prompt: a number that dev reads. It has no effect on schnell.",
                sizes="About a million pixels in all: 1024×1024, 1152×896, 1344×768.",
            ),
        ),
    ),
)
