"""What the nodes of one family of models differ in from those of another. Nothing heavy is imported: ComfyUI starts
with this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL, GenerationSettings

Index = Mapping[str, Any]
"""A model_index.json."""


@dataclasses.dataclass(frozen=True)
class NodeFamily:
    key: str
    """What the ids of its nodes begin with."""
    name: str
    category: str
    hub_models: tuple[str, ...]
    """The first is the default of every node."""
    accepts: Callable[[Index], bool]
    """Whether a directory in ComfyUI's model folders is one of this family."""
    defaults: GenerationSettings
    latent_format: str
    """Of comfy.latent_formats, for previews."""
    encoder: str = "Wan's UMT5 encoder"
    native_encoder: str = " or from ComfyUI's CLIP Text Encode with Wan's encoder"
    """Where embeddings may come from besides the family's own node; empty: nowhere."""
    languages: str = "in English or Chinese"
    extras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Embeddings besides "text" -> what a CONDITIONING calls them."""
    filled: bool = True
    """Shorter texts are filled up with zeros, which is what the model was trained on."""
    picture: bool = False
    """It makes pictures: no frames, no fps."""
    negative: bool = True
    """Some of its models have a branch for a negative prompt."""
    negative_help: str = "Has an effect where guidance_scale is over 1."
    size_max: int = 1280
    size_step: int = 16
    frames_step: int = 4
    """Frames are this many times n, plus one: as many as a latent holds."""
    frames_max: int = 121
    frames_help: str = "81 frames at 16 frames a second are 5 seconds."
    schedulers: tuple[str, ...] = ("unipc", "euler", "dpm++")
    scheduler_help: str = "unipc is Wan's own; euler is the plainest; dpm++ is the multistep one"
    guidance_help: str = (
        "How closely to follow the prompt. At 1 or less the negative prompt is not used: a step computes one branch "
        "instead of two, half the work on one chip. On a mesh with dp=2 that saves no time."
    )
    sizes_help: str = "720P is 1280×720, 480P is 848×480."
    has_demo: bool = False
    images: Literal["", "frame", "beginning", "references"] = ""
    """What pictures are to some of its models: the first frame, one to start from and make anew, or some to look at."""
    fit: str = "resized to the video's"
    """What becomes of a picture that is a frame and has another size."""
    last_image: bool = True
    """Some of those that begin with a frame end with one."""
    second_guidance: bool = False
    """Some of its models have two transformers."""
    shift_max: float = 10.0
    shift_help: str = "5.0 for 720P, 3.0 for 480P"
    trained_fps: str = "16"
    reads_fps: bool = False
    """Its models are told how fast the video is: the sampler asks for it too."""

    @property
    def text_encoder_name(self) -> str:
        return f"{self.name} Text Encoder (TPU)"

    @property
    def noun(self) -> str:
        return "picture" if self.picture else "video"

    @property
    def encodes_images(self) -> bool:
        """A node of their own does."""
        return self.images in ("frame", "references")

    @property
    def models(self) -> tuple[str, ...]:
        """Those that are there without any directory."""
        return (*self.hub_models, DEMO_MODEL, DEMO_IMAGE_MODEL) if self.has_demo else self.hub_models


def _is_wan22(index: Index) -> bool:
    return index.get("boundary_ratio") is not None or bool(index.get("expand_timesteps"))


_WAN_PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")

WAN21 = NodeFamily(
    key="Wan21",
    name="Wan 2.1",
    category="TPU/Wan2.1",
    hub_models=(
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    ),
    accepts=lambda index: index.get("_class_name") in _WAN_PIPELINES and not _is_wan22(index),
    defaults=GenerationSettings(),
    latent_format="Wan21",
    has_demo=True,
    images="frame",
)

WAN22 = NodeFamily(
    key="Wan22",
    name="Wan 2.2",
    category="TPU/Wan2.2",
    hub_models=(
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    ),
    accepts=lambda index: index.get("_class_name") in _WAN_PIPELINES and _is_wan22(index),
    defaults=GenerationSettings(num_inference_steps=40, guidance_scale=4.0, guidance_scale_2=3.0, flow_shift=12.0),
    latent_format="Wan21",
    images="frame",
    second_guidance=True,
    shift_max=20.0,
    shift_help="12 for text-to-video A14B, 5 for image-to-video A14B and the 5B",
    trained_fps="16, the 5B at 24",
)

FLUX = NodeFamily(
    key="Flux",
    name="Flux",
    category="TPU/Flux",
    hub_models=("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"),
    accepts=lambda index: index.get("_class_name") == "FluxPipeline",
    defaults=GenerationSettings(
        height=1024, width=1024, num_frames=1, num_inference_steps=28, guidance_scale=3.5, scheduler="euler"
    ),
    latent_format="Flux",
    encoder="Flux's CLIP and T5 encoders",
    native_encoder=" or from ComfyUI's CLIP Text Encode with Flux's encoders",
    languages="in English",
    extras={"pooled": "pooled_output"},
    filled=False,
    picture=True,
    negative=False,
    images="beginning",
    size_max=2048,
    schedulers=("euler", "unipc", "dpm++"),
    scheduler_help="euler is Flux's own; unipc and dpm++ are multistep ones",
    guidance_help="How closely to follow the prompt: a number that dev reads. It has no effect on schnell.",
    sizes_help="About a million pixels in all: 1024×1024, 1152×896, 1344×768.",
)

FLUX2 = dataclasses.replace(
    FLUX,
    key="Flux2",
    name="Flux.2",
    hub_models=(
        "black-forest-labs/FLUX.2-dev",
        "black-forest-labs/FLUX.2-klein-4B",
        "black-forest-labs/FLUX.2-klein-9B",
        "black-forest-labs/FLUX.2-klein-base-4B",
        "black-forest-labs/FLUX.2-klein-base-9B",
    ),
    accepts=lambda index: index.get("_class_name") in ("Flux2Pipeline", "Flux2KleinPipeline"),
    defaults=dataclasses.replace(FLUX.defaults, num_inference_steps=50, guidance_scale=4.0),
    latent_format="Flux2",
    encoder="Flux.2's language model",
    native_encoder=" or from ComfyUI's CLIP Text Encode with Flux.2's encoder",
    extras={},
    negative=True,
    negative_help="Has an effect on klein base alone, where guidance_scale is over 1.",
    images="references",
    scheduler_help="euler is Flux.2's own; unipc and dpm++ are multistep ones",
    guidance_help="How closely to follow the prompt: a number that dev reads, and the weight of the prompt against the "
    "negative one in klein base. It has no effect on klein.",
)

HUNYUAN = NodeFamily(
    key="HunyuanVideo15",
    name="HunyuanVideo 1.5",
    category="TPU/HunyuanVideo",
    hub_models=(
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    ),
    accepts=lambda index: index.get("_class_name") in ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    defaults=GenerationSettings(
        num_frames=121, guidance_scale=6.0, flow_shift=9.0, scheduler="euler", fps=24, max_sequence_length=1000
    ),
    latent_format="HunyuanVideo15",
    encoder="HunyuanVideo's Qwen2.5-VL and ByT5 encoders",
    native_encoder="",
    extras={name: f"tpu_{name}" for name in ("text_mask", "glyph", "glyph_mask")},
    schedulers=("euler", "unipc", "dpm++"),
    scheduler_help="euler is HunyuanVideo's own; unipc and dpm++ are multistep ones",
    shift_max=20.0,
    shift_help="9 for the 720P model, 5 for the 480P model",
    images="frame",
    fit="of which the middle is taken, in the video's shape",
    last_image=False,
    trained_fps="24",
)

LTX = NodeFamily(
    key="LTXVideo",
    name="LTX-Video",
    category="TPU/LTX-Video",
    hub_models=("Lightricks/LTX-Video",),
    accepts=lambda index: index.get("_class_name") in ("LTXPipeline", "LTXImageToVideoPipeline"),
    defaults=GenerationSettings(
        height=512,
        width=704,
        num_frames=161,
        guidance_scale=3.0,
        flow_shift=1.0,
        scheduler="euler",
        fps=25,
        max_sequence_length=128,
    ),
    latent_format="LTXV",
    encoder="LTX-Video's T5 encoder",
    native_encoder="",
    languages="in English",
    extras={"text_mask": "tpu_text_mask"},
    size_step=32,
    frames_step=8,
    frames_max=257,
    frames_help="161 frames at 25 frames a second are 6 seconds.",
    sizes_help="704×512 is the model's own size.",
    schedulers=("euler", "unipc", "dpm++"),
    scheduler_help="euler is LTX-Video's own; unipc and dpm++ are multistep ones",
    shift_help="a factor on the model's own, which grows with size and length",
    images="frame",
    last_image=False,
    trained_fps="25",
    reads_fps=True,
)

NODE_FAMILIES: tuple[NodeFamily, ...] = (WAN21, WAN22, FLUX, FLUX2, HUNYUAN, LTX)
