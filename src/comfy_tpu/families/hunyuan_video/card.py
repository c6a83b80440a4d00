"""HunyuanVideo-1.5: facts."""

from __future__ import annotations

import dataclasses

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config, FamilyCard, ImageInput, Limits, ModelCard, NodeSet, Preset, Words
from comfy_tpu.families.shared.published import transformer_configs

_480P: Config = {"height": 480, "width": 848, "flow_shift": 5.0}

_LICENCE = "Tencent Hunyuan Community"

HUNYUAN15 = ModelCard(
    name="HunyuanVideo-1.5",
    pipeline_classes=("HunyuanVideo15Pipeline",),
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=4,
        frames_max=1025,
        schedulers=("euler", "unipc", "dpm++"),
        tokens_max=1000,
    ),
    defaults=GenerationSettings(
        num_frames=121,
        guidance_scale=6.0,
        flow_shift=9.0,
        scheduler="euler",
        fps=24,
        max_sequence_length=1000,
    ),
    # Without a shift: it belongs to the model, and each size has a model of its own.
    sizes={"720P": {"height": 720, "width": 1280}, "480P": {"height": 480, "width": 848}},
    spatial_scale=16,
    temporal_scale=4,
    own_defaults={"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": _480P},
    published=transformer_configs(
        __package__,
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    ),
    licences=dict.fromkeys(
        (
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        ),
        _LICENCE,
    ),
    presets={
        "4step": Preset(
            {"num_inference_steps": 4, "guidance_scale": 1.0, "scheduler": "euler", "flow_shift": 5.0},
            patterns=(r"(?<!\d)4[-_ ]?steps?(?![a-z])", r"lightx2v"),
            sources=("lightx2v/Hy1.5-Distill-Models",),
        ),
    },
    reads_single_files=True,
)

HUNYUAN15_IMAGE = dataclasses.replace(
    HUNYUAN15,
    name="HunyuanVideo-1.5 image-to-video",
    pipeline_classes=("HunyuanVideo15ImageToVideoPipeline",),
    image=ImageInput("first_frame", required=True, resize="crop"),
    cuts_media=True,
    defaults=dataclasses.replace(HUNYUAN15.defaults, flow_shift=7.0),
    own_defaults={"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": _480P},
    published=transformer_configs(
        __package__,
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    ),
    licences=dict.fromkeys(
        (
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        ),
        _LICENCE,
    ),
)

CARD = FamilyCard(
    package="comfy_tpu.families.hunyuan_video",
    title="HunyuanVideo-1.5",
    node_sets=(
        NodeSet(
            key="HunyuanVideo15",
            name="HunyuanVideo 1.5",
            category="TPU/HunyuanVideo",
            models=(HUNYUAN15, HUNYUAN15_IMAGE),
            latent_format="HunyuanVideo15",
            conditioning_keys={name: f"tpu_{name}" for name in ("text_mask", "glyph", "glyph_mask")},
            shift_max=20.0,
            words=Words(
                text_encoder="HunyuanVideo's Qwen2.5-VL and ByT5 encoders",
                languages="in English or Chinese",
                schedulers="euler is HunyuanVideo's own; unipc and dpm++ are multistep ones",
                sizes="720P is 1280×720, 480P is 848×480.",
                frames="121 frames at 24 frames a second are 5 seconds.",
                flow_shift="9 for the 720P model, 7 where it begins with an image, 5 for the 480P models",
                trained_fps="24",
            ),
        ),
    ),
)
