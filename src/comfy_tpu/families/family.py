"""What a family of models says of itself: facts as data, and a few small functions on torch tensors.

A picture is a video of one frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from PIL.Image import Image

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.lora_names import Rows
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.parallel.workload import Workload

Config = Mapping[str, Any]
"""The content of a config.json."""

SchedulerFactory = Callable[[GenerationSettings], Any]
"""A diffusers scheduler with its timesteps set."""

LoraNames = Callable[[str, tuple[int, ...]], Mapping[str, Rows]]
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
class TextEncoder:
    """One of a family's readers of the prompt. Its function runs inside a trace."""

    component: ComponentSpec
    encode: Callable[..., dict[str, torch.Tensor]]
    """(module, **tokens) -> what the transformer reads of it, by name, a row for every prompt."""
    tokenizer: str = "tokenizer"
    """The folder of its tokenizer."""
    tokenize: Callable[[Any, Sequence[str], int], dict[str, torch.Tensor]] | None = None
    """(tokenizer, prompts, length) -> inputs of `encode`, input_ids and attention_mask among them, the same number of
    tokens for every prompt. None: those two, filled up to length."""
    length: int | None = None
    """Tokens that it always reads. None: settings.max_sequence_length."""


@dataclasses.dataclass(frozen=True)
class References:
    """Pictures to look at, each in a size of its own."""

    fit: Callable[[Image], Image]
    """Brings one to a size that the VAE takes, or refuses it."""
    most: int
    """How many may be given."""


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """How a family begins with a picture that is given, and may end with another one; or looks at some."""

    encode_frames: Callable[..., tuple[torch.Tensor, Cache]]
    """(the VAE's module, pixels [batch, 3, 1 or `temporal_scale`, height, width] in -1..1, cache or None) -> one frame
    of the transformer's latents, and the cache after it."""
    condition: Callable[[Sequence[torch.Tensor], int, GenerationSettings], dict[str, torch.Tensor]]
    """(latents of the pictures' video frame by frame, how many pictures, settings) -> embeddings by name, on the host.
    Of references, the latents of each."""
    encoder: ComponentSpec | None = None
    """Of the picture's content, beside the VAE."""
    embed: Callable[..., dict[str, torch.Tensor]] | None = None
    """(the encoder's module, pixel_values) -> embeddings by name."""
    processor: str = "image_processor"
    """The folder that says how `pixel_values` are made."""
    optional: tuple[str, ...] = ()
    """Embeddings that the model may do without. None: without a picture it makes nothing."""
    last: bool = False
    """A last picture may be given too."""
    both: bool = False
    """And must be: the model has a place for each of two, and none for one alone."""
    first_only: bool = False
    """Only the first frame is encoded: there is nothing to say about the others."""
    fit: Literal["squeeze", "crop"] = "squeeze"
    """How a picture of another shape becomes a frame. squeeze: all of it, resized to the frame; the encoder beside the
    VAE sees it as it was given. crop: its middle, and nobody sees the rest."""
    references: References | None = None
    """The pictures are not frames."""
    finish: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    """(latents after the last step, embeddings) -> latents, on the host."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """In latents: pieces of pictures that are too large to be decoded at once."""

    side: int = 32
    """256 pixels where a latent has 8, as diffusers tiles the Wan VAE."""
    overlap: int = 8
    """What neighbours share, and blend over."""


@dataclasses.dataclass(frozen=True)
class VideoFamily:
    """Everything the pipeline needs to know. The functions run inside a trace; `module` is the component's skeleton."""

    name: str
    matches: Callable[[Config, Config], bool]
    """(model_index.json, the transformer's config.json) -> whether it is a model of this family."""
    pipeline_classes: tuple[str, ...]
    """What `matches` finds as `_class_name` in model_index.json: for listings and messages."""
    transformers: tuple[ComponentSpec, ...]
    """One; or two, the second for timesteps below `settings.boundary`."""
    text_encoders: tuple[TextEncoder, ...]
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
    latent_channels: Callable[[Config], int]
    """From the VAE's configuration."""
    latent_statistics: Callable[[Config], tuple[list[float], list[float]]]
    """The VAE's configuration -> mean and standard deviation of its latents, by channel. The transformer's latents are
    the VAE's, less the mean, over the deviation."""
    clean_prompt: Callable[[str], str]
    embedding_shapes: Callable[[Config, GenerationSettings], Mapping[str, tuple[int, ...]]]
    """(the transformer's configuration, settings) -> what the text encoders say of one prompt: name and shape."""
    prepare: Callable[..., Mapping[str, torch.Tensor]]
    """(module, **embeddings) -> what every step needs of the prompt. Names with a dot become weights of the
    transformer, the others are inputs of `predict`, with the batch first."""
    predict: Callable[..., torch.Tensor]
    """(module, latents, timestep, guidance_scale, **prepared) -> velocity."""
    decode_frame: Callable[..., tuple[torch.Tensor, Cache]]
    """(module, latent frame, cache or None) -> frames [batch, t, height, width, 3] in 0..1, and the cache after it. All
    latent frames at once where the family is `whole`."""
    workload: Callable[[Config, GenerationSettings], Workload]
    """The transformer's configuration -> what a step costs, to choose a mesh by and to plan with."""
    published: Mapping[str, Config]
    """Configurations of transformers by their id on the hub: full-size models can be planned without a download."""
    encode_picture: Callable[..., torch.Tensor] | None = None
    """(module of the VAE, picture [1, height, width, 3] in 0..1, noise [1, channels, 1, height, width]) -> latents to
    start from, in the transformer's scale. None: this family starts from noise alone."""
    prepared_axes: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    """How outputs of `prepare` are split over the mesh. What is not named is whole, until a step splits its batch."""
    guidance: Literal["branches", "embedded", "none"] = "branches"
    """branches: a second forward with the negative prompt. embedded: a number that the model reads. none: it has
    no effect, because the model was distilled without it."""
    first_cache: Callable[[int], Cache | None] = lambda frames: None
    """(latent frames) -> the cache that comes with the first one: for a VAE that must know how many there will be."""
    whole: bool = False
    """The VAE looks at frames to come: `decode_frame` is given all latent frames of a video together."""
    tiles: Tiles = Tiles()
    own_settings: Callable[[Callable[[str], Config]], Mapping[str, Any]] = lambda read: {}
    """(reads a JSON file of the model directory, empty where there is none) -> settings that the model brings along."""
    own_schedulers: Callable[[Callable[[str], Config]], Mapping[str, SchedulerFactory]] = lambda read: {}
    """As `own_settings` -> schedulers by name that go before `schedulers`."""
    conditions: Callable[[GenerationSettings], Mapping[str, torch.Tensor]] = lambda settings: {}
    """What `prepare` is told of the settings, by name, a row each; beside the embeddings, and the same for all."""
    image: ImageInput | None = None
    curves: Mapping[str, Config] = dataclasses.field(default_factory=dict)
    """Published reuse curves: the file in assets/reuse -> what the configuration of the transformer says of its model.
    Which velocities may be reused; a model directory's own reuse.json goes before them."""

    lora_names: LoraNames = lambda module, shape: {}
    """Beside diffusers' own, which every family takes."""

    @property
    def transformer(self) -> ComponentSpec:
        return self.transformers[0]

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        image = (self.image.encoder,) if self.image is not None and self.image.encoder is not None else ()
        return (*(encoder.component for encoder in self.text_encoders), *image, *self.transformers, self.vae)
