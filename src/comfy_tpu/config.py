"""All defaults, as frozen dataclasses that are passed whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

MESH_AXES = ("dp", "sp", "tp")
"""dp: batch and CFG branches; sp: sequence; tp: heads and columns. Every mesh has all three, of size 1 where unused."""

DEMO_MODEL, DEMO_IMAGE_MODEL = "demo", "demo-image"
"""The models that come with the package: from a prompt, and from a prompt and a first frame."""

Platform = Literal["tpu", "gpu", "cpu"]

Quantization = Literal["none", "fp8", "int8"]
"""The precision of a transformer's large matrix products. Anything but none changes the result slightly."""

SequenceParallel = Literal["auto", "ulysses", "ring"]

VaeBackend = Literal["torchax", "nnx", "tiny"]
"""tiny: a tiny decoder in the place of the VAE's, from `RuntimeConfig.tiny_vae`; the VAE encodes as ever."""
"""The implementation of a VAE: diffusers' module through torchax, or the Wan 2.1 VAE in Flax NNX."""
VAE_BACKENDS: tuple[VaeBackend, ...] = ("torchax", "nnx", "tiny")
VAE_BACKEND: VaeBackend = "torchax"
"""The default backend. Measurements: docs/torchax-vs-flax.md."""


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    dp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def device_count(self) -> int:
        return self.dp * self.sp * self.tp

    def __str__(self) -> str:
        return f"dp={self.dp},sp={self.sp},tp={self.tp}"


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """The processes, one on each host, that run a model together."""

    coordinator: str | None = None
    """HOST:PORT of process 0; the next port is used too. "auto": as TPU metadata, GKE, Slurm or Open MPI say. None: one
    process alone."""
    num_processes: int | None = None
    """None, here and below: as the cluster says."""
    process_id: int | None = None
    hosts_timeout: float = 300.0
    """Seconds in which all processes must join."""


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    gather_min_bytes: int = 64 * 1024
    """Weights with one dimension, or smaller than this (per layer), are not split in storage: gathering them costs only
    latency, and saves almost no memory."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile of the splash kernel: query rows, key rows fetched, key rows computed at a time."""

    query: int
    key: int
    key_compute: int

    def __str__(self) -> str:
        return f"{self.query},{self.key},{self.key_compute}"


AttentionImplementation = Literal["auto", "splash", "hopper", "cudnn", "chunked", "int8"]
"""int8: as auto, with queries and keys in 8 bits; faster on H100 and H200, with slightly different results."""


@dataclasses.dataclass(frozen=True)
class TokenWindow:
    """A video token attends to the tokens near it in the sequence, which goes by frames, rows and columns."""

    left: int
    """The number of tokens before it."""
    right: int
    """The number of tokens after it."""

    def __str__(self) -> str:
        return f"{self.left},{self.right}"


@dataclasses.dataclass(frozen=True)
class TileWindow:
    """A video token attends to the tiles near its own, in time and space, and to all text: sliding tile attention."""

    tile: tuple[int, int, int]
    """Frames, rows and columns of the largest tile, in tokens. An axis is divided into tiles as equal as possible."""
    tiles: tuple[int, int, int]
    """Tiles that a token attends to along frames, rows and columns. At a border the window moves inwards."""
    is_clipped: bool = False
    """Whether a tile that is larger than the video is cut to it. False: it is refused."""

    def __str__(self) -> str:
        return ":".join("x".join(map(str, sides)) for sides in (self.tile, self.tiles))


ATTENTION_WINDOWS: dict[str, TokenWindow | TileWindow | None] = {
    "full": None,
    # 1,024 tokens a tile: with fewer, a TPU spends more time between blocks than in them. At 720p and 81 frames 27 of
    # 90 tiles are attended to.
    "video": TileWindow(tile=(4, 16, 16), tiles=(3, 3, 3), is_clipped=True),
}
"""Attention windows by name."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    implementation: AttentionImplementation = "auto"
    sequence_parallel: SequenceParallel = "auto"
    smooth_keys: bool = True
    """Whether the splash kernel's bounds on scores count from the mean key, which a softmax does not depend on, instead
    of from zero: they are narrower then, and more blocks take the faster form."""
    block_sizes: BlockSizes | None = None
    """The tile of the splash kernel. None: from the table by chip and length."""
    int8_min_tokens: int = 4096
    """The fewest queries, and keys, that meet in 8 bits where the implementation is int8."""
    dense_max_tokens: int = 4096
    """The most keys for which an L×L score array may be made, on any backend."""
    window: TokenWindow | TileWindow | None = None
    """The tokens that a video token attends to in the transformer's self-attention. None: all of them. Text encoders,
    VAEs and attention to the prompt are never limited."""
    over_mesh: bool = True
    """Whether heads are split over the mesh. False: every device computes all heads, for models that are too small to
    split; a kernel of ours then computes a share of the queries on each."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    directory: Path | None = None
    """None: JAX_COMPILATION_CACHE_DIR, else comfy-tpu/xla under the user's cache directory."""
    enabled: bool = True
    limit_bytes: int | None = None
    """Beyond it, the least recently used programs are removed. None: COMFY_TPU_CACHE_LIMIT, else 20 GB."""


@dataclasses.dataclass(frozen=True)
class SkeletonLimits:
    """Limits on what a module allocates while it is built: with a wrong number in its configuration it could take
    hours."""

    tensors: int = 2**13
    """The number of weights. HunyuanVideo 1.5 has 1,801, the most of our families; 8,192 are allocated in two
    seconds."""
    elements: int = 2**42
    """Elements of all weights together."""
    computed: int = 2**26
    """Elements of one tensor that is not a weight, such as a RoPE table: those take memory."""
    error_suffix: str = "which no known model has"
    """The end of the error message."""


@dataclasses.dataclass(frozen=True)
class ResidencyConfig:
    weights_fraction: float = 0.85
    """The fraction of each device's memory that weights may take; the rest is for activations."""
    budget_bytes: int | None = None
    """Bytes per device, instead of the fraction."""


@dataclasses.dataclass(frozen=True)
class FastSettings:
    """Lossy settings that go together, with `quantize`, and 8 bits in attention, as the devices have it. A value that
    the user chooses goes before these, and one that would save nothing is left out."""

    reuse: float = 0.12
    guidance_until: float = 0.7
    """43 forwards of Wan 2.1 14B in 50 steps instead of 100. On an H200 at 480p, with 2.15 s a forward in fp8 instead
    of 2.49 s and 2 s for the text encoder and the VAE, this is 2.66 times faster; 0.8 would be 2.49 to 2.54 times."""


FAST = FastSettings()


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """How a model runs: on which devices, in which precision, with which kernels and caches."""

    mesh: str | MeshSizes = "auto"
    """ "auto": the best layout by estimate; "single"; "seed"; or axes such as "dp=2,sp=4"."""
    platform: str = "auto"
    """ "tpu", "gpu", "cpu"; "auto": the first of them that is here."""
    dtype: str = "auto"
    """ "bfloat16" or "float32"; "auto": bfloat16, but float32 on a CPU."""
    quantize: Quantization | None = None
    """Large matrix products of the transformer in 8 bits: faster, with slightly different results. None: "none"; with
    `fast`, the 8-bit format of the devices."""
    fast: FastSettings | None = None
    """Replaces the model's defaults: much faster, with different results. None: only what is chosen is lossy."""
    vae_backend: VaeBackend = VAE_BACKEND
    tiny_vae: Path | None = None
    """A safetensors file of a tiny decoder (TAESD, TAEHV): for previews, and with vae_backend "tiny" for all frames.
    None: that of the model directory, with that backend, and no other previews than colours without it."""
    attention: AttentionConfig = AttentionConfig()
    cache: CacheConfig = CacheConfig()
    memory: ResidencyConfig | None = None
    """None: the models of this process share the devices' memory by the default rules."""
    ignored_config_keys: tuple[str, ...] = ()
    """Keys of the model's configurations that are left out, where the installed libraries do not know them."""
    dump: Path | None = None
    """A directory for the text of every program that is compiled or read from the cache."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a model runs in a node, and the settings of a run that nodes have no other inputs for."""

    runtime: RuntimeConfig = RuntimeConfig()
    reuse: float | None = None
    """None, here and below: the model's default."""
    guidance_until: float | None = None
    num_videos: int | None = None
    preset: str | None = None
    """A preset of the model by its name, or "auto"; its settings replace those of the node's inputs. None: none."""
    context: str | None = None
    context_frames: int | None = None
    context_overlap: int | None = None
    context_weights: str | None = None
    context_stride: int | None = None
    context_noise: str | None = None
    context_keyframes: float | None = None
    tile: str | None = None
    tile_overlap: float | None = None
    cpu_fallback: bool = False
    """Whether the TPU Compile nodes may run a large model on the CPU where the devices cannot."""
    allow_download: bool = False
    """Whether a node may download a model of any size. Without it, one that takes long is refused."""

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen values by field of `GenerationSettings`."""
        others = ("runtime", "preset", "cpu_fallback", "allow_download")
        return {name: value for name, value in vars(self).items() if name not in others}

    @property
    def context_settings(self) -> dict[str, Any]:
        """Those of them that say how a long video is made."""
        return {name: value for name, value in self.settings.items() if name.startswith("context")}


LoraNoise = Literal["all", "high", "low", "auto"]
"""The transformer of two that a LoRA is for. auto: as the file's name says, all where it says nothing."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """A LoRA file, and how much of it is added to a model."""

    path: Path
    strength: float = 1.0
    """The factor on the file's change; negative values subtract it."""
    noise: LoraNoise = "auto"
    """The transformer that gets the LoRA, for a model with two."""


@dataclasses.dataclass(frozen=True)
class SingleFiles:
    """A model in single safetensors files, as ComfyUI's model folders hold them, instead of a model directory."""

    transformers: tuple[Path, ...]
    """One; or two, for high and for low noise."""
    text_encoders: tuple[Path, ...]
    """In any order."""
    vae: Path
    image_encoder: Path | None = None
    """For models that need one."""
    base: str | None = None
    """The model directory or hub id with the configurations and tokenizers, which single files lack. None: the
    published model that the transformer's shapes are those of."""

    @property
    def paths(self) -> tuple[Path, ...]:
        image_encoder = () if self.image_encoder is None else (self.image_encoder,)
        return (*self.transformers, *self.text_encoders, self.vae, *image_encoder)


@dataclasses.dataclass(frozen=True)
class RemoteServer:
    """A server that the nodes of a graph run on."""

    address: str
    wait_seconds: float
    """How long it is waited for where it does not answer."""


@dataclasses.dataclass(frozen=True)
class Interpolation:
    """More frames per second, by a network that makes frames between frames."""

    factor: int
    """Of the frames per second."""
    model: Path
    """A safetensors file of RIFE."""


UpscaleBy = Literal["latent", "latent-bilinear", "latent-nearest", "pixels"]
"""How the latents of a second pass are made. latent: resized, bicubic. pixels: decoded, resized by Lanczos, encoded."""


@dataclasses.dataclass(frozen=True)
class SecondPass:
    """A second pass at a larger size, from the upscaled result of the first."""

    scale: float
    """The factor of both sides."""
    strength: float = 0.5
    """The share of the steps that are run again, counted from the last."""
    steps: int = 0
    """The steps of which that share is run. 0: as many as in the first pass."""
    by: UpscaleBy = "latent"


SECOND_PASS = "second-pass"
"""In the names of the files that its steps are saved to."""


INIT_IMAGE_STRENGTH, INIT_VIDEO_STRENGTH = 0.6, 0.8
"""The default strengths of image-to-image and video-to-video: the share of the image or video that is replaced."""
CONTROL_STRENGTH = 1.0
"""The default strength of given videos and references that a model reads beside the prompt."""

ContextSchedule = Literal["static", "uniform", "looped"]
"""Where the windows of a long video lie. static: the same at every step. uniform: moved from step to step, and spread
over the video with a stride. looped: uniform, with the end and the beginning of the video as neighbours."""
Context = Literal["auto", "none", "static", "uniform", "looped", "continue"]
"""How a video longer than the model's own length is made. auto: whole up to `CONTEXT_WHOLE` times that length; beyond,
continued where the video begins with an image, else by static windows. none: whole, whatever its length. continue: one
segment after the other, each from the last frame of the one before."""
ContextWeights = Literal["pyramid", "flat", "overlap-linear"]
"""How windows are blended. pyramid: most in the middle of a window. overlap-linear: a ramp over the overlap."""
ContextNoise = Literal["random", "freenoise"]
"""freenoise: the noise of the first window, shuffled, is that of the others, too."""

CONTEXT_WHOLE = 1.5
"""Up to this many times its own length, a video is made whole where context is auto: at 1.25 times, windows would take
twice as long. 121 frames of Wan 2.1, which has 81, are made whole."""

CONTEXT_OVERLAP = 3 / 8
"""The part of a window that it shares with its neighbour: 30 of 81 frames, as in ComfyUI's node for Wan."""


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """The settings of one video, except its prompt. A model directory may have its own defaults in
    `generation.json`."""

    height: int = 720
    width: int = 1280
    num_frames: int = 81
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    flow_shift: float = 5.0
    seed: int = 2025
    scheduler: str = "unipc"
    negative_prompt: str = ""
    num_videos: int = 1
    fps: int = 16
    max_sequence_length: int = 512
    guidance_scale_2: float = 0.0
    """guidance_scale of the second transformer, for a model with two. 0: the same as guidance_scale."""
    boundary: float = 0.0
    """The share of the noise below which the second transformer takes over. 0: never."""
    reuse: float = 0.0
    """The estimated error of reused velocities at which the transformer runs again. 0: it runs at every step. 0.12 is
    recommended: half of 50 steps are computed."""
    guidance_until: float = 1.0
    """The fraction of the steps, from the first, that are guided. The others run the prompt alone, as at guidance_scale
    1."""
    sigmas: str = ""
    """The noise levels at which the steps begin, before flow_shift, such as "1,0.75,0.5,0.25", for an Euler scheduler
    and a model that was trained on fixed ones. Empty: the scheduler's own."""
    cfg_normalization: float = 0.0
    """The largest norm of a guided velocity, in norms of the prompt's own, for models that limit it. 0: no limit."""
    stg_scale: float = 0.0
    """Spatio-temporal guidance of models that make sound: how far to go from what the model says without the
    self-attention of one block. 0: no such branch."""
    stg_block: int = 0
    """The number, from 0, of that block."""
    modality_scale: float = 1.0
    """How closely video and sound follow each other, as guidance_scale says it of the prompt. 1: no such branch."""
    guidance_rescale: float = 0.0
    """The share of the change of contrast by guidance that is taken back, of models that make sound."""
    audio_guidance_scale: float = 0.0
    """guidance_scale of the sound. 0, here and below: the same as the video's."""
    audio_stg_scale: float = 0.0
    audio_modality_scale: float = 0.0
    audio_guidance_rescale: float = 0.0
    context: str = "auto"
    """One of `Context`."""
    context_frames: int = 0
    """The frames of a window, or of a segment. 0: the model's own length, its default number of frames."""
    context_overlap: int = -1
    """Frames that neighbouring windows share, in whole latents. -1: `CONTEXT_OVERLAP` of a window."""
    context_weights: str = "pyramid"
    """One of `ContextWeights`."""
    context_stride: int = 1
    """For the schedules uniform and looped: beside neighbouring frames, windows of every second, fourth, … frame, up to
    2 ** (this - 1)."""
    context_noise: str = "random"
    """One of `ContextNoise`."""
    context_keyframes: float = 0.0
    """The share of the steps, from the first, that compute one window of frames from the whole video; what is predicted
    for the frames between them is the mean of their neighbours."""
    tile: str = ""
    """Width and height, "832x480", of the tiles that the transformer looks at where the result is larger; there are no
    keyframes then. Empty: it looks at the whole."""
    tile_overlap: float = 0.25
    """The part of a tile that it has in common with its neighbour, at least."""


@dataclasses.dataclass(frozen=True)
class ReuseConfig:
    """Bounds on step reuse besides its threshold, as in MagCache."""

    first_computed_fraction: float = 0.2
    """The fraction of the steps, from the first, that are always computed: they determine what the video shows."""
    max_consecutive_reused: int = 2
    """The most steps that are reused before one is computed."""
