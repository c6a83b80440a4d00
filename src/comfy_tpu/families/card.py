"""The facts of a model family, as data: names, hub ids, limits, defaults, and the words that help texts need.

A family is a directory with a `card.py`, whose `CARD` is a FamilyCard, and a `model.py` with the code. Cards import
neither torch nor jax: ComfyUI starts with them, and so does the command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL, VAE_BACKEND, GenerationSettings, VaeBackend

Config = Mapping[str, Any]
"""The content of a config.json."""

SCHEDULER_FILE = "scheduler/scheduler_config.json"
"""In a model directory; some models differ in nothing else."""

Guidance = Literal["classifier_free", "embedded", "none"]
"""classifier_free: a second forward with the negative prompt. embedded: the model reads guidance_scale as a number.
none: guidance_scale has no effect, because the model was distilled without it."""

ImageRole = Literal["first_frame", "reference", "initial"]
"""first_frame: the video begins with the image. reference: the model looks at the images beside the prompt. initial:
denoising starts from the image with noise added to it."""

VIDEO_NAMES = ("video", "mask", "pose_video", "face_video", "background_video")
"""The names of given videos: fields of requests, flags, and inputs of nodes."""

VideoRole = Literal["initial", "control", "mask"]
"""initial: denoising starts from the video with noise added to it. control: the model reads the video beside the
prompt. mask: white where the model makes something new."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The settings that a model accepts."""

    size_multiple: int
    size_min: int
    size_max: int
    frames_multiple: int
    """The number of frames is this many times n, plus one."""
    frames_max: int
    schedulers: tuple[str, ...]
    steps_max: int = 1000
    guidance_max: float = 100.0
    shift_max: float = 100.0
    videos_max: int = 64
    fps_max: int = 240
    segment_overlaps: tuple[int, ...] = ()
    """Frames that a segment may take from the one before, the default first, of a model that makes all videos segment
    by segment. Empty: a video is made at once where it is no longer than the model's own length."""
    segment_multiple: int = 4
    """A segment has this many frames times n, plus one."""
    tokens_max: int = 512
    tokens_multiple: int = 1
    """max_sequence_length is this many times n."""
    blocks: int = 0
    """Blocks that stg_block chooses from."""
    reuse_max: float = 1.0


@dataclasses.dataclass(frozen=True)
class SoundFacts:
    """The sound that a model makes with a video."""

    latents_per_second: float


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """The images that a model takes beside the prompt."""

    role: ImageRole
    required: bool = False
    """Whether the model needs an image."""
    last_image: Literal["no", "optional", "required"] = "no"
    """Whether an image for the last frame may or must be given beside the first."""
    resize: Literal["stretch", "crop"] = "stretch"
    """How an image of another aspect ratio becomes a frame. stretch: resized to the frame; the image encoder sees the
    image as it was given. crop: its center, and nothing sees the rest."""
    max_images: int = 1
    seen_by_text_encoder: bool = False
    """Whether the text encoder sees the images too, so that a prompt is encoded with them."""
    result_area: int = 0
    """The pixels of a result that has the shape of the last image where no size is chosen. 0: it has the model's own
    size."""

    @property
    def max_frames(self) -> int:
        """Images that may be given as frames."""
        return 1 if self.last_image == "no" else 2


@dataclasses.dataclass(frozen=True)
class VideoInput:
    """A video that a model takes beside the prompt: moving pictures, or one for all frames of a mask."""

    name: str
    """One of VIDEO_NAMES."""
    role: VideoRole
    words: str
    """What it is, as a phrase of help texts: "the video to be changed"."""
    required: bool = False
    needs: tuple[str, ...] = ()
    """Inputs that have to be given beside it."""
    may_be_shorter: bool = False
    """Whether the model goes on where the video ends before the result. False: a shorter one is refused."""
    side_key: str = ""
    """The key of the transformer's configuration with the side of its frames, which are square. Empty: they have the
    size of the result."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings that go together, chosen by one word: those that a distilled checkpoint or LoRA was trained for."""

    settings: Mapping[str, Any]
    """Values by field of GenerationSettings."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that are found, whatever the case, in the names of files and folders made for the preset."""
    sources: tuple[str, ...] = ()
    """Published files of that kind: a hub id, or a file of one as OWNER/NAME/FILE."""
    lora_strength: float = 1.0
    """The strength that such a LoRA is made for."""
    lora: str = ""
    """The path of a LoRA inside the model directory, which the preset brings along."""
    is_distilled: bool = False
    """Whether the model itself is made for these settings, so that no other file is needed."""


NOT_STATED = "not stated"
"""The licence of weights whose page on the hub names none."""


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """One kind of model of a family: models that one set of functions runs."""

    name: str
    pipeline_classes: tuple[str, ...]
    """The `_class_name` values of model_index.json."""
    limits: Limits
    defaults: GenerationSettings
    sizes: Mapping[str, Mapping[str, Any]]
    """Settings by the name of a size: "720P"."""
    spatial_scale: int
    """Pixels per latent, on a side."""
    temporal_scale: int
    """Frames per latent, except the first."""
    published: Mapping[str, Config]
    """Transformer configurations by hub id: full-size models are planned without a download."""
    own_defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """The values in which a published model differs from `defaults`, by hub id."""
    matches: Callable[[Config, Config], bool] = lambda index, config: True
    """(model_index.json, the transformer's config.json) -> whether a model of `pipeline_classes` is of this kind."""
    refuses: Callable[[Config], str] = lambda config: ""
    """(the transformer's config.json) -> why a model that matches cannot be run all the same; "" where it can."""
    matches_scheduler: Callable[[Config], bool] = lambda scheduler: True
    """(scheduler_config.json) -> the same, for kinds whose other configurations are equal."""
    guidance: Guidance = "classifier_free"
    guidance_off: float = 1.0
    """The largest guidance_scale without a second forward: 0 where the scale is what is added to the prompt's own
    velocity."""
    normalizes_guidance: bool = False
    """Whether cfg_normalization limits the guided velocity."""
    transformer_count: int = 1
    """2: the second one computes the timesteps below `settings.boundary`."""
    image: ImageInput | None = None
    max_references: int = 0
    """Reference images that may be given beside those of `image`."""
    videos: tuple[VideoInput, ...] = ()
    """Videos that may be given. The first one decides how long the result is where nobody else does."""
    has_control_strength: bool = False
    """Whether the effect of given videos and references on the result can be weakened."""
    reads_fps: bool = False
    """Whether the frame rate is an input of the transformer."""
    sound: SoundFacts | None = None
    """None: videos are silent."""
    cuts_media: bool = False
    """Whether what a step reads of given images and videos lies beside the latents, so that windows and tiles cut it
    like them."""
    encodes_results: bool = False
    """Whether the VAE encodes whole videos, or images, as a second pass by pixels does; False: a first frame at
    most."""
    vae_backends: tuple[VaeBackend, ...] = (VAE_BACKEND,)
    """The backends of the VAE, the default first."""
    reuse_curves: Mapping[str, Config] = dataclasses.field(default_factory=dict)
    """Published reuse curves: a file in assets/reuse -> the values of the transformer's configuration it was measured
    with. A model directory's own reuse.json takes precedence."""
    licences: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of the licences of the published weights, by hub id, or NOT_STATED."""
    presets: Mapping[str, Preset] = dataclasses.field(default_factory=dict)
    """Settings for few steps, by name: "4step". A model directory's own presets.json replaces them."""
    reads_single_files: bool = False
    """Whether the model may be given as single files, as ComfyUI's model folders hold them."""

    @property
    def makes_images(self) -> bool:
        return self.limits.frames_max == 1

    @property
    def starts_from_image(self) -> bool:
        """Whether denoising may start from an image."""
        return self.image is not None and self.image.role == "initial"

    @property
    def takes_references(self) -> bool:
        """Whether all of its images are references."""
        return self.image is not None and self.image.role == "reference"

    @property
    def starts_from_video(self) -> bool:
        """Whether denoising may start from a video."""
        return any(video.role == "initial" for video in self.videos)

    def defaults_of(self, hub_id: str) -> GenerationSettings:
        """The defaults of a published model; `defaults` for any other."""
        return dataclasses.replace(self.defaults, **self.own_defaults.get(hub_id, {}))

    def find_video(self, name: str) -> VideoInput | None:
        return next((video for video in self.videos if video.name == name), None)

    def accepts(self, index: Config, config: Config, scheduler: Config) -> bool:
        """Whether a model directory holds a model of this kind: model_index.json, and the configurations of transformer
        and scheduler, empty where it has none."""
        return (
            index.get("_class_name") in self.pipeline_classes
            and self.matches(index, config)
            and self.matches_scheduler(scheduler)
        )

    def is_guided(self, guidance_scale: float) -> bool:
        """Whether a step computes two branches at this scale."""
        return self.guidance == "classifier_free" and guidance_scale > self.guidance_off

    @property
    def makes_segments(self) -> bool:
        """Whether all videos are made segment by segment, from given videos, whatever their length."""
        return bool(self.limits.segment_overlaps)

    def segment_overlap(self, settings: GenerationSettings) -> int:
        """The last frames of a segment with which the next one begins."""
        return settings.context_overlap if self.makes_segments else 1

    def segment_count(self, settings: GenerationSettings) -> int:
        """Of a video that is made segment by segment, each `context_frames` long."""
        overlap = self.segment_overlap(settings)
        return max(1, math.ceil((settings.num_frames - overlap) / (settings.context_frames - overlap)))

    def latent_frames(self, settings: GenerationSettings) -> int:
        """Of all segments, where the model makes segments alone: frames that two have in common are there twice."""
        if not self.makes_segments:
            return (settings.num_frames - 1) // self.temporal_scale + 1
        return self.segment_count(settings) * ((settings.context_frames - 1) // self.temporal_scale + 1)

    def sound_tokens(self, settings: GenerationSettings) -> int:
        """Latents of the sound; 0 where there is none."""
        if self.sound is None:
            return 0
        return max(1, round(settings.num_frames / settings.fps * self.sound.latents_per_second))

    def latent_size(self, settings: GenerationSettings) -> tuple[int, int, int]:
        """Frames, height and width of the latents, with the frames that hold the sound: a latent of it takes the place
        of one of the video."""
        height, width = settings.height // self.spatial_scale, settings.width // self.spatial_scale
        sound = -(-self.sound_tokens(settings) // (height * width))
        return self.latent_frames(settings) + sound, height, width


@dataclasses.dataclass(frozen=True)
class Words:
    """The parts of help texts that differ between families; each completes a sentence of `comfy/inputs.py`."""

    text_encoder: str
    """The name of the text encoder: "Wan's UMT5 encoder"."""
    schedulers: str
    """A description of the first scheduler and of the others."""
    sizes: str
    """The usual sizes, as a sentence."""
    native_text_encoder: str = ""
    """Another source of embeddings, with its conjunction; empty: none."""
    languages: str = "in English"
    negative_prompt: str = "Has an effect where guidance_scale is over 1."
    guidance: str = (
        "How closely to follow the prompt. At 1 or less the negative prompt is not used: a step computes one branch "
        "instead of two, half the work on one chip. On a mesh with dp=2 that saves no time."
    )
    references: str = "Over a million pixels it is scaled down."
    """What becomes of a reference image, as a sentence."""
    frames: str = ""
    """How long the default number of frames is, as a sentence."""
    flow_shift: str = ""
    trained_fps: str = ""


@dataclasses.dataclass(frozen=True)
class NodeSet:
    """The ComfyUI nodes of models that have the same inputs."""

    key: str
    """The prefix of the node ids."""
    name: str
    category: str
    models: tuple[ModelCard, ...]
    """The first one is the default of model_id."""
    latent_format: str
    """The class in comfy.latent_formats, for previews."""
    words: Words
    conditioning_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Embeddings besides "text" -> their keys in a CONDITIONING."""
    pads_text: bool = True
    """Whether shorter texts are padded with zeros, as in training."""
    size_max: int = 1280
    frames_max: int = 121
    shift_max: float = 10.0
    """The largest values of the widgets; the command line goes up to the model's limits."""
    keeps_numbers: bool = False
    """Whether text encoder, sampler, decoder and pipeline nodes start with the numbers of the first model, instead of 0
    or -1 for those of the chosen one."""
    has_demo_models: bool = False
    """Whether the models that come with the package are of this kind."""

    @property
    def defaults(self) -> GenerationSettings:
        return self.models[0].defaults

    @property
    def limits(self) -> Limits:
        return self.models[0].limits

    @property
    def makes_images(self) -> bool:
        return self.models[0].makes_images

    @property
    def latent_rate(self) -> float:
        """Latent frames in a second of the video, at the default frame rate."""
        return self.defaults.fps / self.models[0].temporal_scale

    @property
    def hub_models(self) -> tuple[str, ...]:
        """Hub ids; the first is the default of every node."""
        return tuple(hub_id for model in self.models for hub_id in model.published)

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Models that can be chosen without a local directory."""
        return (*self.hub_models, DEMO_MODEL, DEMO_IMAGE_MODEL) if self.has_demo_models else self.hub_models

    @property
    def has_negative_prompt(self) -> bool:
        return any(model.guidance == "classifier_free" for model in self.models)

    @property
    def has_second_guidance(self) -> bool:
        return any(model.transformer_count == 2 for model in self.models)

    @property
    def normalizes_guidance(self) -> bool:
        return any(model.normalizes_guidance for model in self.models)

    @property
    def makes_sound(self) -> bool:
        return any(model.sound is not None for model in self.models)

    @property
    def reads_fps(self) -> bool:
        return any(model.reads_fps for model in self.models)

    @property
    def image_inputs(self) -> tuple[ImageInput, ...]:
        return tuple(model.image for model in self.models if model.image is not None)

    @property
    def image_role(self) -> ImageRole | None:
        return self.image_inputs[0].role if self.image_inputs else None

    @property
    def text_encoder_sees_images(self) -> bool:
        return any(image.seen_by_text_encoder for image in self.image_inputs)

    @property
    def has_last_image(self) -> bool:
        return any(image.last_image != "no" for image in self.image_inputs)

    @property
    def video_inputs(self) -> tuple[VideoInput, ...]:
        """Videos that its models take, each name once."""
        return tuple(
            {video.name: video for model in reversed(self.models) for video in reversed(model.videos)}.values()
        )[::-1]

    @property
    def max_references(self) -> int:
        """Reference images that its models take beside others."""
        return max(model.max_references for model in self.models)

    @property
    def starts_from_video(self) -> bool:
        return any(model.starts_from_video for model in self.models)

    @property
    def makes_segments(self) -> bool:
        return any(model.makes_segments for model in self.models)

    @property
    def has_control_strength(self) -> bool:
        return any(model.has_control_strength for model in self.models)

    @property
    def has_image_encoder(self) -> bool:
        """Whether one of its models reads images, and no videos beside them."""
        return self.image_role != "initial" and any(model.image and not model.videos for model in self.models)

    @property
    def has_video_encoder(self) -> bool:
        return bool(self.video_inputs)

    @property
    def crops_images(self) -> bool:
        return any(image.resize == "crop" for image in self.image_inputs)

    def accepts(self, index: Config) -> bool:
        """Whether a model directory is one for these nodes, as far as its model_index.json says."""
        return any(model.accepts(index, {}, {}) for model in self.models)


@dataclasses.dataclass(frozen=True)
class FamilyCard:
    """All facts of a family directory."""

    package: str
    """The importable package of the family: `__package__` of its card."""
    title: str
    """The family's name in tables."""
    node_sets: tuple[NodeSet, ...]
    float32_repositories: tuple[str, ...] = ()
    """Globs of hub ids whose files are float32; those of all others are bfloat16."""
    noise_words: str = ""
    """A regular expression for the names of LoRA files, whose one group is high, low, or their first letter: the
    transformer of two that a file is for. Words that anybody may use are known without it."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.package.rpartition(".")[2]

    @property
    def models(self) -> tuple[ModelCard, ...]:
        return tuple(model for nodes in self.node_sets for model in nodes.models)
