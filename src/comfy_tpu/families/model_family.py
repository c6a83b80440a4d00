"""The code of a model family: small functions on torch tensors that compute text, latents, images and frames. The facts
of a family are in its card.

An image is a video of one frame. Functions that take a `module` run inside a trace; `module` is the component's
skeleton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config, ModelCard
from comfy_tpu.families.media import Clips, FittedMedia
from comfy_tpu.parallel.constraints import Axes

SchedulerFactory = Callable[[GenerationSettings], Any]
"""A diffusers scheduler with its timesteps set."""

ReadJson = Callable[[str], Config]
"""Reads a JSON file of the model directory; empty where there is none."""

Rows = tuple[slice, ...]
"""Slices of the outputs of a module in a LoRA file, in the order of the model's own module."""

LoraNames = Callable[[str, tuple[int, ...]], Mapping[str, Rows]]
"""(a module of the transformer, shape of its weight) -> its other names in LoRA files, with dots between the parts,
each with the outputs that belong to the module: not all where one module of the file is several modules here."""

TokenGrid = Callable[[Config, tuple[int, int, int]], tuple[int, int, int]]
"""(the transformer's configuration, frames, height and width of the latents) -> frames, rows and columns of tokens."""

Cache = list[torch.Tensor | None]
"""A VAE's cache of the frames before."""


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """One encoder of the prompt."""

    component: ComponentSpec
    encode: Callable[..., dict[str, torch.Tensor]]
    """(module, **tokens) -> embeddings by name, a row for every prompt."""
    tokenizer: str = "tokenizer"
    """The folder of its tokenizer."""
    tokenize: Callable[..., dict[str, torch.Tensor]] | None = None
    """(tokenizer, prompts, length, and the images of `read_images`) -> inputs of `encode`, input_ids and attention_mask
    among them, the same number of tokens for every prompt. None: those two, padded to length."""
    length: int | None = None
    """The fixed number of tokens. None: settings.max_sequence_length."""
    read_images: Callable[[Any, Sequence[Image]], dict[str, torch.Tensor]] | None = None
    """(image processor, images as they were given) -> more inputs of `encode` by name, for an encoder that sees the
    images. None: it reads the prompt alone."""
    image_processor: str = "processor"
    """The folder of the image processor of `read_images`."""
    takes: tuple[str, ...] = ()
    """Embeddings of the encoders before it, more inputs of `encode`, which are not kept: they stay on the devices."""
    zeroes_padding: bool = False
    """Whether the embeddings of padding are zeros, and those of the prompt do not depend on its length."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders besides the component's own."""
        return (self.tokenizer,) if self.read_images is None else (self.tokenizer, self.image_processor)


@dataclasses.dataclass(frozen=True)
class TextEncoding:
    """From a prompt to embeddings."""

    encoders: tuple[TextEncoder, ...]
    embedding_shapes: Callable[[Config, GenerationSettings], Mapping[str, tuple[int, ...]]]
    """(the transformer's configuration, settings) -> name and shape of the embeddings of one prompt."""
    clean_prompt: Callable[[str], str] = str


@dataclasses.dataclass(frozen=True)
class GuidanceInputs:
    """What guidance may read besides the velocities of its branches."""

    scale: torch.Tensor
    """settings.guidance_scale."""
    latents: torch.Tensor
    """The sample at the beginning of the step, of all videos."""
    timestep: torch.Tensor
    prepared: Mapping[str, torch.Tensor]
    """The outputs of `prepare` that are inputs of a step: rows of all branches."""


def guide(velocities: Sequence[torch.Tensor], given: GuidanceInputs) -> torch.Tensor:
    """Classifier-free guidance: from the negative prompt's velocity to the prompt's, and beyond."""
    positive, negative = velocities
    return negative + given.scale * (positive - negative)


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """From embeddings and noisy latents to a velocity."""

    transformers: tuple[ComponentSpec, ...]
    """One; or two, the second for timesteps below `settings.boundary`."""
    prepare: Callable[..., Mapping[str, torch.Tensor]]
    """(module, **embeddings) -> the tensors that every step needs of the prompt. Names with a dot become weights of the
    transformer; the others are inputs of `predict`, with the batch first."""
    predict: Callable[..., torch.Tensor]
    """(module, latents, timestep, guidance_scale, **prepared) -> velocity."""
    prepared_axes: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    """How outputs of `prepare` are split over the mesh. Others are whole, until a step splits its batch."""
    negative_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Embeddings of given media that are a constant for the negative prompt."""
    merges_padding: bool = False
    """Whether `prepare` also takes `padding_count`, [batch]: the number of tokens that the last one of `text` stands
    for."""
    settings_inputs: Callable[[GenerationSettings], Mapping[str, torch.Tensor]] = lambda settings: {}
    """Inputs of `prepare` that come from the settings: by name, one row, the same for all prompts, or a row for each
    branch of guidance."""
    extra_branches: Callable[[GenerationSettings], int] = lambda settings: 0
    """Branches of a guided step besides those of the two prompts. They read the prompt's embeddings; `settings_inputs`
    says in what they differ."""
    guide: Callable[[Sequence[torch.Tensor], GuidanceInputs], torch.Tensor] = guide
    """(velocities of the prompt, of the negative prompt and of the extra branches; the rest) -> the guided velocity, in
    float32."""
    frame_inputs: tuple[str, ...] = ()
    """Inputs of `predict`, [batch, channels, latent frames, …], which `prepare` passes on as they are. A window of a
    long video has its own frames of them."""
    token_grid: TokenGrid | None = None
    """The grid of the tokens that `predict` gives to `video_attention`, or to `joint_attention` first. None: attention
    windows are refused."""
    lora_names: LoraNames = lambda module, shape: {}
    """The names in LoRA files besides diffusers' own, which every family accepts."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of frames that are too large, or too many, to be decoded at once, in latents."""

    side: int = 32
    """256 pixels where a latent has 8, as diffusers tiles the Wan VAE."""
    overlap: int = 8
    """The part that neighbours share, and blend over."""
    frames: int = 0
    """The most latent frames at once, for a VAE that reads later frames; 0: all of a video."""
    frame_overlap: int = 0


@dataclasses.dataclass(frozen=True)
class VaeFunctions:
    """How a VAE's frames are computed, one part of a video at a time, with the cache of the parts before it."""

    decode_frame: Callable[..., tuple[Any, Any]]
    """(module, latent, cache or None) -> frames [batch, t, height, width, 3] in 0..1, and the cache after them."""
    decode_axes: Mapping[str, Axes]
    encode_frames: Callable[..., tuple[Any, Any]] | None
    """(module, pixels, cache or None) -> one latent frame, and the cache after it. None: the model takes no images."""
    encode_axes: Mapping[str, Axes]
    make_component: Callable[..., Any] | None = None
    """(configuration, placement, dtype=, attention=, cache=) -> the component, where it is not a torch module's."""
    check: Callable[[Config], None] = lambda config: None
    """Raises UnsupportedError for a VAE configuration that these functions do not compute."""


@dataclasses.dataclass(frozen=True)
class Vae:
    """From latents to frames, and back for image-to-image."""

    component: ComponentSpec
    decode_frame: Callable[..., tuple[torch.Tensor, Cache]]
    """(module, latent frame, cache or None) -> frames [batch, t, height, width, 3] in 0..1, and the cache after it. All
    latent frames at once where `decodes_all_frames`."""
    latent_channels: Callable[[Config], int]
    """From the VAE's configuration."""
    latent_statistics: Callable[[Config], tuple[list[float], list[float]]]
    """The VAE's configuration -> mean and standard deviation of its latents, by channel. The transformer's latents are
    the VAE's, less the mean, over the deviation."""
    first_cache: Callable[[int], Cache | None] = lambda frames: None
    """(latent frames) -> the cache before the first one: for a VAE that must know how many there will be."""
    decodes_all_frames: bool = False
    """Whether the VAE reads later frames, so that `decode_frame` gets all latent frames of a video together."""
    tiles: Tiles = Tiles()
    encode_frames: Callable[..., tuple[torch.Tensor, Cache]] | None = None
    """(module, pixels [batch, 3, 1 or `temporal_scale`, height, width] in -1..1, cache or None) -> one frame of the
    transformer's latents, and the cache after it. All frames at once where `decodes_all_frames`. None: the model is
    given no frames."""
    encode_image: Callable[..., torch.Tensor] | None = None
    """(module, image [1, height, width, 3] in 0..1, noise [1, channels, 1, height, width]) -> latents to start from, in
    the transformer's scale. None: denoising starts from noise alone."""
    other_backends: Mapping[str, Callable[[], VaeFunctions]] = dataclasses.field(default_factory=dict)
    """Implementations besides the torch module, by the name of the backend; imported when asked for."""


@dataclasses.dataclass(frozen=True)
class Sound:
    """From latents of a sound to a waveform."""

    vae: ComponentSpec
    decode: Callable[..., torch.Tensor]
    """(the VAE's module, latents of the transformer [batch, tokens, features]) -> spectrogram."""
    vocoder: ComponentSpec
    synthesize: Callable[..., torch.Tensor]
    """(the vocoder's module, spectrogram) -> waveform [batch, channels, samples] in -1..1."""
    latent_shape: Callable[[Config], tuple[int, int]]
    """The VAE's configuration -> channels and bins of frequency of a latent, whose product is that of the features."""
    sample_rate: Callable[[Config], int]
    """The vocoder's configuration -> samples per second."""


@dataclasses.dataclass(frozen=True)
class SegmentEncoding:
    """What each segment of a video reads, where a video is made segment by segment."""

    embedding_shapes: Callable[[Config, GenerationSettings], Mapping[str, tuple[int, ...]]]
    """(the transformer's configuration, settings of the whole video) -> shapes of the embeddings of given media, of
    which `TextEncoding.embedding_shapes` has those of one segment."""
    clips: Callable[[Mapping[str, torch.Tensor], int, torch.Tensor | None, GenerationSettings], Clips]
    """(embeddings of given media, number of the segment, the last frames of the one before [videos, 3, frames, height,
    width] in -1..1 or None, settings of the whole video) -> what the VAE encodes for the segment."""
    condition: Callable[
        [Mapping[str, Sequence[torch.Tensor]], Mapping[str, torch.Tensor], int, GenerationSettings],
        dict[str, torch.Tensor],
    ]
    """(latents of the clips, embeddings of given media, number of the segment, settings of the whole video) -> the
    embeddings that the segment reads."""


@dataclasses.dataclass(frozen=True)
class MediaEncoding:
    """From given images and videos to embeddings."""

    clips: Callable[[FittedMedia, GenerationSettings, Config], Clips]
    """(media, settings, the transformer's configuration) -> what the VAE encodes, by name."""
    condition: Callable[
        [Mapping[str, Sequence[torch.Tensor]], FittedMedia, GenerationSettings, Config], dict[str, torch.Tensor]
    ]
    """(latents of the clips frame by frame, media, settings, the transformer's configuration) -> embeddings by name, on
    the host. "initial": the latents that denoising starts from."""
    encoder: ComponentSpec | None = None
    """The encoder of an image's content, besides the VAE."""
    embed: Callable[..., dict[str, torch.Tensor]] | None = None
    """(the encoder's module, pixel_values of the images) -> embeddings by name."""
    processor: str = "image_processor"
    """The folder of the preprocessing for `pixel_values`."""
    optional_embeddings: tuple[str, ...] = ()
    """Embeddings that the transformer can do without."""
    encodes_nothing: bool = False
    """Whether the transformer needs embeddings where nothing is given, too."""
    segments: SegmentEncoding | None = None
    """None: a video is made at once."""
    frames_from: str = ""
    """The embedding [channels, frames, height, width] whose frames are those of a step, where there may be more than
    the result has: reference images come first, with their latents in the first channels, and are dropped at the end.
    Empty: a step has those of the result."""
    control_layers: Callable[[Config], int] = lambda config: 1
    """(the transformer's configuration) -> the number of strengths that a control has."""
    fit_reference: Callable[[Image], Image] | None = None
    """Resizes a reference image to a size that the VAE takes, or raises InvalidValueError."""
    fit_frame: Callable[[Image, GenerationSettings], Image] | None = None
    """Makes a frame of an RGB image, or raises InvalidValueError. None: it is resized as the card says."""
    finish: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    """(latents after the last step, embeddings) -> latents, on the host."""


@dataclasses.dataclass(frozen=True)
class Scheduling:
    """The schedulers of a model, and the settings of schedulers in its directory."""

    factories: Mapping[str, SchedulerFactory]
    """Schedulers by the names in the card's limits."""
    own_schedulers: Callable[[ReadJson], Mapping[str, SchedulerFactory]] = lambda read: {}
    """Schedulers that the model directory describes; they take precedence."""
    own_settings: Callable[[ReadJson], Mapping[str, Any]] = lambda read: {}
    """Defaults that the model directory describes."""


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One kind of model: its card and its code."""

    card: ModelCard
    text: TextEncoding
    denoiser: Denoiser
    vae: Vae
    scheduling: Scheduling
    media: MediaEncoding | None = None
    single_files: Mapping[str, PartFile] = dataclasses.field(default_factory=dict)
    """How components are read from single files, by the component's name. Empty: the model needs a directory."""
    sound: Sound | None = None

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def transformer(self) -> ComponentSpec:
        return self.denoiser.transformers[0]

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        media = (self.media.encoder,) if self.media is not None and self.media.encoder is not None else ()
        text = (encoder.component for encoder in self.text.encoders)
        sound = () if self.sound is None else (self.sound.vae, self.sound.vocoder)
        return (*text, *media, *self.denoiser.transformers, self.vae.component, *sound)
