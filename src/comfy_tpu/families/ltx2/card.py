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
from comfy_tpu.families.shared.published import transformer_configs

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

NEGATIVE_PROMPT = (
    "has_subtitles, has_blurbox, transition from black, transition to black, speech_ending_short, "
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive noise, "
    "grainy texture, poor lighting, flickering, motion blur, distorted proportions, unnatural skin tones, "
    "deformed facial features, asymmetrical face, missing facial features, extra limbs, disfigured hands, "
    "wrong hand count, artifacts around text, inconsistent perspective, camera shake, incorrect depth of "
    "field, background too sharp, background clutter, distracting reflections, harsh shadows, inconsistent "
    "lighting direction, color banding, cartoonish rendering, 3D CGI look, unrealistic materials, uncanny "
    "valley effect, incorrect ethnicity, wrong gender, exaggerated expressions, wrong gaze direction, "
    "mismatched lip sync, silent or muted audio, distorted voice, robotic voice, echo, background noise, "
    "off-sync audio, incorrect dialogue, added dialogue, repetitive speech, jittery movement, awkward "
    "pauses, incorrect timing, unnatural transitions, inconsistent framing, tilted camera, flat lighting, "
    "inconsistent tone, cinematic oversaturation, stylized filters, or AI artifacts."
)
"""Lightricks' own."""

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
        num_inference_steps=40,
        guidance_scale=3.0,
        flow_shift=1.0,
        scheduler="euler",
        negative_prompt=NEGATIVE_PROMPT,
        fps=24,
        max_sequence_length=1024,
        modality_scale=3.0,
        guidance_rescale=0.7,
        audio_guidance_scale=7.0,
        stg_scale=1.0,
        stg_block=29,
    ),
    sizes={
        "512P": {"height": 512, "width": 768},
        "704P": {"height": 704, "width": 1216},
        "1088P": {"height": 1088, "width": 1920},
    },
    spatial_scale=32,
    temporal_scale=8,
    encodes_results=True,
    published=transformer_configs(__package__, "Lightricks/LTX-2"),
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
    defaults=dataclasses.replace(LTX2.defaults, num_inference_steps=30, stg_block=28),
    published=transformer_configs(__package__, "diffusers/LTX-2.3-Diffusers"),
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
