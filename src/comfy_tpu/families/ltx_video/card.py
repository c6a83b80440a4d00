"""LTX-Video: facts."""

from __future__ import annotations

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import FamilyCard, ImageInput, Limits, ModelCard, NodeSet, Words
from comfy_tpu.families.shared.published import transformer_configs

LTX_VIDEO = ModelCard(
    name="LTX-Video",
    pipeline_classes=("LTXPipeline", "LTXImageToVideoPipeline"),
    limits=Limits(
        size_multiple=32,
        size_min=32,
        size_max=2048,
        frames_multiple=8,
        frames_max=1025,
        schedulers=("euler", "unipc", "dpm++"),
    ),
    defaults=GenerationSettings(
        height=512,
        width=704,
        num_frames=161,
        num_inference_steps=50,
        guidance_scale=3.0,
        flow_shift=1.0,
        scheduler="euler",
        negative_prompt="worst quality, inconsistent motion, blurry, jittery, distorted",
        fps=25,
        max_sequence_length=128,
    ),
    sizes={"512P": {"height": 512, "width": 704}, "480P": {"height": 480, "width": 832}},
    spatial_scale=32,
    temporal_scale=8,
    encodes_results=True,
    published=transformer_configs(__package__, "Lightricks/LTX-Video"),
    licences={"Lightricks/LTX-Video": "LTX-Video Open Weights"},
    image=ImageInput("first_frame"),
    reads_fps=True,
    reads_single_files=True,
)

CARD = FamilyCard(
    package="comfy_tpu.families.ltx_video",
    title="LTX-Video",
    node_sets=(
        NodeSet(
            key="LTXVideo",
            name="LTX-Video",
            category="TPU/LTX-Video",
            models=(LTX_VIDEO,),
            latent_format="LTXV",
            conditioning_keys={"text_mask": "tpu_text_mask"},
            frames_max=257,
            words=Words(
                text_encoder="LTX-Video's T5 encoder",
                schedulers="euler is LTX-Video's own; unipc and dpm++ are multistep ones",
                sizes="704×512 is the model's own size.",
                frames="161 frames at 25 frames a second are 6 seconds.",
                flow_shift="a factor on the model's own, which grows with size and length",
                trained_fps="25",
            ),
        ),
    ),
)
