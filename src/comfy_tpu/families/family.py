"""What a family of video models says of itself: facts as data, and a few small functions on torch tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.config import GenerationSettings
from comfy_tpu.parallel.workload import Workload

SchedulerFactory = Callable[[float], Any]
"""From flow_shift to a diffusers scheduler."""

LoraNames = Callable[[str, tuple[int, ...]], Mapping[str, slice]]
"""(a module of the transformer, shape of its weight) -> what else LoRA files call it, with dots between the parts, and
which outputs of theirs are the module's: not all where one module of theirs is several here."""

Cache = list[torch.Tensor | None]
"""What a VAE remembers of the frames before."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a model family can make."""

    size_multiple: int
    size_min: int
    size_max: int
    frames_multiple: int
    """Frames are this many times n, plus one."""
    frames_max: int
    schedulers: tuple[str, ...]
    steps_max: int = 1000
    guidance_max: float = 100.0
    shift_max: float = 100.0
    videos_max: int = 64
    fps_max: int = 240
    tokens_max: int = 512
    reuse_max: float = 1.0


@dataclasses.dataclass(frozen=True)
class VideoFamily:
    """Everything the pipeline needs to know. The functions run inside a trace; `module` is the component's skeleton."""

    name: str
    pipeline_classes: tuple[str, ...]
    """`_class_name` in a model directory's model_index.json."""
    transformer: ComponentSpec
    text_encoder: ComponentSpec
    vae: ComponentSpec
    limits: Limits
    defaults: GenerationSettings
    presets: Mapping[str, Mapping[str, Any]]
    """Settings by the name of a size: "720P"."""
    schedulers: Mapping[str, SchedulerFactory]
    spatial_scale: int
    """Pixels a latent has on a side."""
    temporal_scale: int
    """Frames a latent has, except the first."""
    latent_statistics: Callable[[Mapping[str, Any]], tuple[list[float], list[float]]]
    """The VAE's configuration -> mean and standard deviation of its latents, by channel. The transformer's latents are
    the VAE's, less the mean, over the deviation."""
    clean_prompt: Callable[[str], str]
    encode_text: Callable[..., torch.Tensor]
    """(module, input_ids, attention_mask) -> [batch, tokens, features], zeros where there is no token."""
    prompt_cache: Callable[..., Mapping[str, torch.Tensor]]
    """(module, text) -> what every step needs of the prompt, as weights of the transformer."""
    predict: Callable[..., torch.Tensor]
    """(module, latents, timestep) -> velocity; the prompt is in the weights."""
    decode_frame: Callable[..., tuple[torch.Tensor, Cache]]
    """(module, latent frame, cache or None) -> frames [batch, t, height, width, 3] in 0..1, and the cache after it."""
    workload: Callable[[Mapping[str, Any], GenerationSettings], Workload]
    """The transformer's configuration -> what a step costs, to choose a mesh by and to plan with."""
    published: Mapping[str, Mapping[str, Any]]
    """Configurations of transformers by their id on the hub: full-size models can be planned without a download."""

    curves: Mapping[str, Mapping[str, Any]]
    """Published reuse curves: the file in assets/reuse -> what the configuration of the transformer says of its model.
    Which velocities may be reused; a model directory's own reuse.json goes before them."""

    lora_names: LoraNames | None = None
    """None: LoRA files are refused."""

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        return (self.text_encoder, self.transformer, self.vae)
