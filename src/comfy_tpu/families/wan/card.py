"""Wan 2.1 and 2.2: facts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import (
    NOT_STATED,
    Config,
    FamilyCard,
    ImageInput,
    Limits,
    ModelCard,
    NodeSet,
    Preset,
    VideoInput,
    Words,
)
from comfy_tpu.families.shared.published import transformer_configs

_TEXT_PIPELINE, _IMAGE_PIPELINE = "WanPipeline", "WanImageToVideoPipeline"


def _has_two_transformers(index: Config) -> bool:
    return index.get("boundary_ratio") is not None


def _has_timestep_per_token(index: Config) -> bool:
    """Whether the first frame may be given unchanged, at timestep 0."""
    return bool(index.get("expand_timesteps"))


def _is_wan21(index: Config) -> bool:
    return not _has_two_transformers(index) and not _has_timestep_per_token(index)


def _is_a14b(index: Config) -> bool:
    return _has_two_transformers(index) and not _has_timestep_per_token(index)


_FEW_STEPS: Config = {"guidance_scale": 1.0, "scheduler": "euler-trailing", "flow_shift": 5.0}
"""LightX2V's own settings for its distilled models: no guidance, shift 5, timesteps 1000, 750, 500 and 250 before the
shift."""
_CAUSVID_SIGMAS = "0.999,0.934,0.862,0.756,0.603,0.41,0.25,0.14,0.074"
"""LightX2V's timesteps for CausVid, over 1000. They have their shift."""

_PRESETS = {
    "4step": Preset(
        {"num_inference_steps": 4, **_FEW_STEPS},
        patterns=(r"(?<!\d)4[-_ ]?steps?(?![a-z])", r"cfg[-_ ]?step[-_ ]?distill", r"step[-_ ]?distill", r"lightx2v"),
        sources=("lightx2v/Wan2.1-Distill-Loras", "lightx2v/Wan2.1-Distill-Models"),
    ),
    "8step": Preset({"num_inference_steps": 8, **_FEW_STEPS}, patterns=(r"(?<!\d)8[-_ ]?steps?(?![a-z])",)),
    "causvid": Preset(
        {
            "num_inference_steps": 9,
            "guidance_scale": 1.0,
            "scheduler": "euler",
            "flow_shift": 1.0,
            "sigmas": _CAUSVID_SIGMAS,
        },
        patterns=(r"causvid",),
        sources=("Kijai/WanVideo_comfy",),
    ),
}

# The boundary stays the model's: at shift 5 the four steps begin at 1, 0.94, 0.83 and 0.63 of the noise, so that each
# transformer has two, as in LightX2V's settings, at text-to-video's 0.875 and at image-to-video's 0.9.
_PAIR_PRESETS = {
    "4step": Preset(
        {**_PRESETS["4step"].settings, "guidance_scale_2": 1.0},
        patterns=(*_PRESETS["4step"].patterns, r"lightning"),
        sources=("lightx2v/Wan2.2-Distill-Loras", "lightx2v/Wan2.2-Lightning", "lightx2v/Wan2.2-Distill-Models"),
    ),
    "8step": dataclasses.replace(_PRESETS["8step"], settings={**_PRESETS["8step"].settings, "guidance_scale_2": 1.0}),
}

_APACHE = "Apache 2.0"

_NEGATIVE_PROMPTS = json.loads(Path(__file__).with_name("negative_prompts.json").read_text(encoding="utf-8"))
"""Wan's own, in Chinese. Wan 2.1's models for images put further words in front of the others'."""

_480P: Config = {"height": 480, "width": 832, "flow_shift": 3.0}
"""Of the models for 480P: the size that they are trained at, with the shift of their published schedulers."""

WAN21 = ModelCard(
    name="Wan 2.1",
    pipeline_classes=(_TEXT_PIPELINE,),
    matches=lambda index, config: _is_wan21(index),
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=4,
        frames_max=1025,
        schedulers=("unipc", "euler", "dpm++", "euler-trailing"),
    ),
    defaults=GenerationSettings(negative_prompt=_NEGATIVE_PROMPTS["video"]),
    sizes={
        "720P": {"height": 720, "width": 1280, "flow_shift": 5.0},
        "480P": {"height": 480, "width": 848, "flow_shift": 3.0},
    },
    spatial_scale=8,
    temporal_scale=4,
    encodes_results=True,
    published=transformer_configs(__package__, "Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    own_defaults={"Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _480P},
    videos=(VideoInput("video", "initial", words="the video to be changed"),),
    licences=dict.fromkeys(("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), _APACHE),
    vae_backends=("torchax", "nnx"),
    presets=_PRESETS,
    reads_single_files=True,
    reuse_curves={
        "wan21-t2v-14b.json": {"num_layers": 40, "num_attention_heads": 40},
        "wan21-t2v-1.3b.json": {"num_layers": 30, "num_attention_heads": 12},
    },
)

WAN21_IMAGE = dataclasses.replace(
    WAN21,
    name="Wan 2.1 image-to-video",
    pipeline_classes=(_IMAGE_PIPELINE,),
    matches=lambda index, config: _is_wan21(index) and config.get("pos_embed_seq_len") is None,
    image=ImageInput("first_frame", required=True),
    videos=(),
    cuts_media=True,
    defaults=dataclasses.replace(
        WAN21.defaults, num_inference_steps=40, negative_prompt=_NEGATIVE_PROMPTS["first frame"]
    ),
    own_defaults={"Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _480P},
    published=transformer_configs(
        __package__, "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
    ),
    licences=dict.fromkeys(("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"), _APACHE),
    reuse_curves={},
)

WAN21_FIRST_LAST = dataclasses.replace(
    WAN21_IMAGE,
    name="Wan 2.1 first and last frame",
    matches=lambda index, config: _is_wan21(index) and config.get("pos_embed_seq_len") is not None,
    image=ImageInput("first_frame", required=True, last_image="required"),
    defaults=dataclasses.replace(
        WAN21.defaults, flow_shift=16.0, negative_prompt=_NEGATIVE_PROMPTS["first and last frame"]
    ),
    own_defaults={},
    sizes={name: {**size, "flow_shift": 16.0} for name, size in WAN21.sizes.items()},
    published=transformer_configs(__package__, "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers"),
    licences={"Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": _APACHE},
)

WAN22 = dataclasses.replace(
    WAN21,
    name="Wan 2.2",
    matches=lambda index, config: _is_a14b(index),
    transformer_count=2,
    videos=(),
    # As the authors' own settings for this model have them. The scheduler's file is not asked for the shift: diffusers'
    # conversion writes Wan 2.1's 3.0 into it.
    defaults=dataclasses.replace(
        WAN21.defaults,
        num_inference_steps=40,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        flow_shift=12.0,
        boundary=0.875,
    ),
    own_defaults={},
    sizes={name: {**size, "flow_shift": 12.0} for name, size in WAN21.sizes.items()},
    published=transformer_configs(__package__, "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
    licences={"Wan-AI/Wan2.2-T2V-A14B-Diffusers": _APACHE},
    presets=_PAIR_PRESETS,
    reuse_curves={},
)

WAN22_IMAGE = dataclasses.replace(
    WAN22,
    name="Wan 2.2 image-to-video",
    pipeline_classes=(_IMAGE_PIPELINE,),
    image=ImageInput("first_frame", required=True, last_image="optional"),
    cuts_media=True,
    defaults=dataclasses.replace(
        WAN22.defaults, guidance_scale=3.5, guidance_scale_2=3.5, flow_shift=5.0, boundary=0.9
    ),
    sizes=WAN21.sizes,
    published=transformer_configs(__package__, "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
    licences={"Wan-AI/Wan2.2-I2V-A14B-Diffusers": _APACHE},
)

WAN22_5B = dataclasses.replace(
    WAN21,
    name="Wan 2.2 5B",
    pipeline_classes=(_TEXT_PIPELINE, _IMAGE_PIPELINE),
    matches=lambda index, config: not _has_two_transformers(index) and _has_timestep_per_token(index),
    image=ImageInput("first_frame"),
    videos=(),
    limits=dataclasses.replace(WAN21.limits, size_multiple=32, size_min=32),
    defaults=dataclasses.replace(
        WAN21.defaults, height=704, width=1280, num_frames=121, fps=24, flow_shift=5.0, guidance_scale=5.0
    ),
    own_defaults={},
    sizes={"720P": {"height": 704, "width": 1280, "flow_shift": 5.0}},
    spatial_scale=16,
    published=transformer_configs(__package__, "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
    licences={"Wan-AI/Wan2.2-TI2V-5B-Diffusers": _APACHE},
    presets={name: _PRESETS[name] for name in ("4step", "8step")},
    vae_backends=("torchax",),
    reuse_curves={},
)

WAN_VACE = dataclasses.replace(
    WAN21,
    name="Wan 2.1 VACE",
    pipeline_classes=("WanVACEPipeline",),
    image=ImageInput("first_frame", last_image="optional"),
    max_references=4,
    videos=(
        VideoInput(
            "video",
            "control",
            words="the video to be changed, continued or followed (its depth, poses, edges)",
            may_be_shorter=True,
        ),
        VideoInput("mask", "mask", words="white where --video is made anew, black where it stays", needs=("video",)),
    ),
    has_control_strength=True,
    cuts_media=True,
    # As Wan's own code has it for VACE, at every size.
    defaults=dataclasses.replace(WAN21.defaults, flow_shift=16.0),
    own_defaults={"Wan-AI/Wan2.1-VACE-1.3B-diffusers": {**_480P, "flow_shift": 16.0}},
    sizes={name: {**size, "flow_shift": 16.0} for name, size in WAN21.sizes.items()},
    presets={},
    published=transformer_configs(__package__, "Wan-AI/Wan2.1-VACE-14B-diffusers", "Wan-AI/Wan2.1-VACE-1.3B-diffusers"),
    licences=dict.fromkeys(("Wan-AI/Wan2.1-VACE-14B-diffusers", "Wan-AI/Wan2.1-VACE-1.3B-diffusers"), _APACHE),
    reuse_curves={},
)

WAN22_VACE = dataclasses.replace(
    WAN_VACE,
    name="Wan 2.2 VACE-Fun",
    matches=lambda index, config: _is_a14b(index),
    transformer_count=2,
    defaults=WAN22.defaults,
    own_defaults={},
    sizes=WAN22.sizes,
    published=transformer_configs(__package__, "linoyts/Wan2.2-VACE-Fun-14B-diffusers"),
    # A conversion of alibaba-pai/Wan2.2-VACE-Fun-A14B. Its page names no licence; another conversion says Apache 2.0.
    licences={"linoyts/Wan2.2-VACE-Fun-14B-diffusers": NOT_STATED},
)

WAN_ANIMATE = dataclasses.replace(
    WAN21,
    name="Wan 2.2 Animate",
    pipeline_classes=("WanAnimatePipeline",),
    matches=lambda index, config: True,
    limits=dataclasses.replace(WAN21.limits, frames_multiple=1, frames_max=10_000, segment_overlaps=(1, 5)),
    image=ImageInput("reference", required=True),
    videos=(
        VideoInput("pose_video", "control", words="the poses that the person of --image takes", required=True),
        VideoInput(
            "face_video",
            "control",
            words="the faces that the person of --image makes, cropped to squares",
            required=True,
            side_key="motion_encoder_size",
        ),
        VideoInput(
            "background_video",
            "control",
            words="the video in which the person of --image replaces another",
            needs=("mask",),
        ),
        VideoInput(
            "mask",
            "mask",
            words="white where --background-video shows the one who is replaced",
            needs=("background_video",),
        ),
    ),
    # As the authors' own settings and diffusers' pipeline have them.
    defaults=dataclasses.replace(
        WAN21.defaults,
        num_frames=77,
        num_inference_steps=20,
        guidance_scale=1.0,
        fps=30,
        context_frames=77,
        context_overlap=1,
    ),
    own_defaults={},
    sizes={name: {**size, "flow_shift": 5.0} for name, size in WAN21.sizes.items()},
    presets={},
    licences={"Wan-AI/Wan2.2-Animate-14B-Diffusers": _APACHE},
    published=transformer_configs(__package__, "Wan-AI/Wan2.2-Animate-14B-Diffusers"),
    reuse_curves={},
)

_WORDS = Words(
    text_encoder="Wan's UMT5 encoder",
    native_text_encoder=" or from ComfyUI's CLIP Text Encode with Wan's encoder",
    languages="in English or Chinese",
    schedulers="unipc is Wan's own; euler is the plainest; dpm++ is the multistep one; euler-trailing is for "
    "distilled models",
    sizes="720P is 1280×720, 480P is 848×480.",
    frames="81 frames at 16 frames a second are 5 seconds.",
    flow_shift="5.0 for 720P, 3.0 for 480P",
    trained_fps="16",
)

CARD = FamilyCard(
    package="comfy_tpu.families.wan",
    title="Wan",
    float32_repositories=("Wan-AI/Wan2.1-*",),
    # With the name of a model or of its distillers only: a style may have such a word in its name, too.
    noise_words=r"(?=.*(?:a14b|wan[-_. ]?2[-_.]?2|lightning|lightx2v)).*(?:^|[-_. ])(high|low|h|l)(?:[-_. ]|$)",
    node_sets=(
        NodeSet(
            key="Wan21",
            name="Wan 2.1",
            category="TPU/Wan2.1",
            models=(WAN21, WAN21_IMAGE, WAN21_FIRST_LAST),
            latent_format="Wan21",
            words=_WORDS,
            keeps_numbers=True,
            has_demo_models=True,
        ),
        NodeSet(
            key="Wan22",
            name="Wan 2.2",
            category="TPU/Wan2.2",
            models=(WAN22, WAN22_IMAGE, WAN22_5B),
            latent_format="Wan21",
            words=dataclasses.replace(
                _WORDS,
                flow_shift="12 for text-to-video A14B, 5 for image-to-video A14B and the 5B",
                trained_fps="16, the 5B at 24",
            ),
            shift_max=20.0,
        ),
        NodeSet(
            key="WanVACE",
            name="Wan VACE",
            category="TPU/Wan VACE",
            models=(WAN_VACE, WAN22_VACE),
            latent_format="Wan21",
            words=dataclasses.replace(
                _WORDS, flow_shift="16 for 2.1, 12 for 2.2", references="White surrounds it in the frame of the video."
            ),
            shift_max=20.0,
        ),
        NodeSet(
            key="WanAnimate",
            name="Wan Animate",
            category="TPU/Wan Animate",
            models=(WAN_ANIMATE,),
            latent_format="Wan21",
            words=dataclasses.replace(
                _WORDS,
                flow_shift="5.0",
                trained_fps="30",
                frames="As many as the pose video has, or fewer.",
                references="It is fitted into the frame of the video.",
            ),
            frames_max=1001,
        ),
    ),
)
