"""What the nodes of one family of models differ in from those of another. Nothing heavy is imported: ComfyUI starts
with this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from comfy_tpu.config import DEMO_MODEL, GenerationSettings

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
    languages: str = "in English or Chinese"
    has_demo: bool = False
    images: bool = False
    """Some of its models begin with a picture."""
    second_guidance: bool = False
    """Some of its models have two transformers."""
    shift_max: float = 10.0
    shift_help: str = "5.0 for 720P, 3.0 for 480P"
    trained_fps: str = "16"

    @property
    def text_encoder_name(self) -> str:
        return f"{self.name} Text Encoder (TPU)"

    @property
    def models(self) -> tuple[str, ...]:
        """Those that are there without any directory."""
        return (*self.hub_models, DEMO_MODEL) if self.has_demo else self.hub_models


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
    images=True,
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
    images=True,
    second_guidance=True,
    shift_max=20.0,
    shift_help="12 for text-to-video A14B, 5 for image-to-video A14B and the 5B",
    trained_fps="16, the 5B at 24",
)

NODE_FAMILIES: tuple[NodeFamily, ...] = (WAN21, WAN22)
