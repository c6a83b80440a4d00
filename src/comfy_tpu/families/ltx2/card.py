"""LTX-2: facts."""

from __future__ import annotations

import dataclasses

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import (
    Config,
    FamilyCard,
    ImageInput,
    Limits,
    ModelCard,
    NodeSet,
    Preset,
    SoundFacts,
    Words,
)

TRANSFORMER: Config = {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "cross_attention_dim": 4096,
    "vae_scale_factors": (8, 32, 32),
    "audio_in_channels": 128,
    "audio_out_channels": 128,
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "audio_scale_factor": 4,
    "audio_sampling_rate": 16000,
    "audio_hop_length": 160,
    "num_layers": 48,
    "caption_channels": 3840,
    "rope_double_precision": True,
    "rope_type": "split",
}
"""The configuration, with diffusers' defaults for values that config.json leaves out."""
MODULATED_TRANSFORMER: Config = {
    **TRANSFORMER,
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
"""That of LTX-2.3: heads have gates, and the timestep modulates the prompt."""

_NEWER = {
    "ff_bias": True,
    "audio_ff_bias": True,
    "use_prompt_adaln_single": True,
    "use_keyframes_abs_pos_embedding": False,
}
"""What LTX-2.5 changed; the values up to LTX-2.3."""


def refuse_newer(config: Config) -> str:
    if {name: config.get(name, value) for name, value in _NEWER.items()} == _NEWER:
        return ""
    return (
        f"the transformer is that of LTX-2.5 ({', '.join(_NEWER)}), which is not supported; use LTX-2.3 "
        "(diffusers/LTX-2.3-Diffusers) or LTX-2 (Lightricks/LTX-2)"
    )


_DISTILLED = Preset(
    {
        "num_inference_steps": 8,
        "guidance_scale": 1.0,
        "scheduler": "euler-trailing",
        "flow_shift": 1.0,
        "sigmas": "1,0.99375,0.9875,0.98125,0.975,0.909375,0.725,0.421875",
    },
    patterns=(r"ltx.*distill",),
    sources=("Lightricks/LTX-2/ltx-2-19b-distilled-lora-384.safetensors",),
)
"""Lightricks' own for its distilled models: no guidance, and noise levels that neither size nor length shifts."""

LTX2 = ModelCard(
    name="LTX-2",
    pipeline_classes=("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    limits=Limits(
        size_multiple=32,
        size_min=64,
        size_max=4096,
        frames_multiple=8,
        frames_max=1025,
        schedulers=("euler", "unipc", "dpm++", "euler-trailing"),
        tokens_max=1024,
        tokens_multiple=128,
        blocks=48,
    ),
    defaults=GenerationSettings(
        height=512,
        width=768,
        num_frames=121,
        num_inference_steps=30,
        guidance_scale=3.0,
        flow_shift=1.0,
        scheduler="euler",
        fps=24,
        max_sequence_length=1024,
        modality_scale=3.0,
        guidance_rescale=0.7,
        audio_guidance_scale=7.0,
        stg_block=28,
    ),
    sizes={
        "512P": {"height": 512, "width": 768},
        "704P": {"height": 704, "width": 1216},
        "1088P": {"height": 1088, "width": 1920},
    },
    spatial_scale=32,
    temporal_scale=8,
    encodes_results=True,
    published={"Lightricks/LTX-2": TRANSFORMER},
    licences={"Lightricks/LTX-2": "LTX-2 Community License"},
    matches=lambda index, config: not config.get("cross_attn_mod"),
    refuses=refuse_newer,
    presets={"8step": _DISTILLED},
    image=ImageInput("first_frame"),
    reads_fps=True,
    sound=SoundFacts(latents_per_second=25.0),
)
LTX23 = dataclasses.replace(
    LTX2,
    name="LTX-2.3",
    # What diffusers recommends: all four branches of guidance.
    defaults=dataclasses.replace(LTX2.defaults, stg_scale=1.0),
    published={"diffusers/LTX-2.3-Diffusers": MODULATED_TRANSFORMER},
    # As others report it of Lightricks/LTX-2.3; the conversion's own page was not seen.
    licences={"diffusers/LTX-2.3-Diffusers": "LTX-2 Community License"},
    matches=lambda index, config: bool(config.get("cross_attn_mod")),
    presets={
        "8step": dataclasses.replace(
            _DISTILLED,
            sources=(
                "diffusers/LTX-2.3-Distilled-Diffusers",
                "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-lora-384.safetensors",
            ),
        ),
    },
)

CARD = FamilyCard(
    package="comfy_tpu.families.ltx2",
    title="LTX-2",
    node_sets=(
        NodeSet(
            key="LTX2",
            name="LTX-2",
            category="TPU/LTX-2",
            models=(LTX2, LTX23),
            latent_format="LTXV",
            conditioning_keys={"audio_text": "tpu_audio_text"},
            pads_text=False,  # learned registers stand behind a prompt
            frames_max=257,
            words=Words(
                text_encoder="LTX-2's Gemma 3 encoder",
                schedulers="euler is LTX-2's own; unipc and dpm++ are multistep ones; euler-trailing is for distilled "
                "models, with a flow_shift that size and length do not change",
                sizes="768×512 is the model's own size.",
                guidance="How closely to follow the prompt. At 1 or less a step computes the prompt's branch alone: "
                "neither the negative prompt nor the scales below count.",
                frames="121 frames at 24 frames a second are 5 seconds, with their sound.",
                flow_shift="a factor on the model's own, which grows with size and length",
                trained_fps="24",
            ),
        ),
    ),
)
