"""What a call takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import Lora, UpscaleBy

LoraLike: TypeAlias = "str | Path | tuple[str | Path, float] | Lora"
"""A .safetensors file, alone (strength 1) or with a strength."""

ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray | torch.Tensor"
"""A file, a PIL image, or pixels [height, width, 3]: uint8, or floats in 0..1."""


VideoLike: TypeAlias = "str | Path | Sequence[ImageLike] | np.ndarray | torch.Tensor"
"""A file or a directory of numbered images, which are read at `fps`; or frames one by one: images, or pixels [frames,
height, width, 3], without the last dimension for a mask."""


class Media(TypedDict, total=False):
    """What may be given beside the prompt and the images, as the model takes it."""

    references: ImageLike | Sequence[ImageLike]
    video: VideoLike
    mask: VideoLike
    """White where the model makes something new; one image stands for all frames."""
    pose_video: VideoLike
    face_video: VideoLike
    background_video: VideoLike
    strength: float
    """The share of an image or a video to start from that is replaced."""
    control_strength: float | Sequence[float]
    """The effect of videos and references that the model reads beside the prompt; or of each layer of the control."""


class Settings(TypedDict, total=False):
    """The settings of a call, as in `GenerationSettings`; the others have the model's defaults."""

    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float
    seed: int
    scheduler: str
    negative_prompt: str
    num_videos: int
    fps: int
    max_sequence_length: int
    guidance_scale_2: float
    boundary: float
    reuse: float
    guidance_until: float
    sigmas: str
    cfg_normalization: float
    stg_scale: float
    stg_block: int
    modality_scale: float
    guidance_rescale: float
    audio_guidance_scale: float
    audio_stg_scale: float
    audio_modality_scale: float
    audio_guidance_rescale: float
    context: str
    context_frames: int
    context_overlap: int
    context_weights: str
    context_stride: int
    context_noise: str
    context_keyframes: float
    tile: str
    tile_overlap: float


class Upscale(TypedDict, total=False):
    """A second pass at a larger size."""

    upscale: float
    """The factor of both sides; the others are of no use without it."""
    upscale_strength: float
    """The share of the steps that are run again."""
    upscale_steps: int
    """The steps of which that share is run; 0: as many as in the first pass."""
    upscale_by: UpscaleBy


class CallSettings(Settings, Media, Upscale, total=False):
    """The settings of a call, what is given beside the prompt, and a second pass."""
