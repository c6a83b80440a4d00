"""The Python interface: open a model, call it with a prompt, save the video.

import comfy_tpu

pipe = comfy_tpu.open("demo")
video = pipe("a red circle moving left", seed=7)
video.save("x.mp4")
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings, Lora, RuntimeConfig, SingleFiles
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.families.settings import merge_choices
from comfy_tpu.pipeline import artifacts, media
from comfy_tpu.pipeline.given_media import GivenMedia, choose_frames
from comfy_tpu.pipeline.images import as_rgb, read_image
from comfy_tpu.pipeline.progress import ProgressCallback, ignore_progress
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import Frames, VideoSource, open_video

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


class CallSettings(Settings, Media, total=False):
    """The settings of a call, and what is given beside the prompt."""


@dataclasses.dataclass(frozen=True)
class Video:
    """The generated frames, on the host. An image is a video of one frame."""

    frames: np.ndarray
    """uint8 [frames, height, width, 3]."""
    prompt: str
    settings: GenerationSettings
    metadata: Mapping[str, str] = dataclasses.field(repr=False)
    """The metadata that `save` writes into files."""
    sound: np.ndarray | None = None
    """float32 [channels, samples] in -1..1, as long as the frames; None of a model that makes no sound."""
    sample_rate: int = 0
    """Samples of the sound per second."""

    def save(self, path: str | Path) -> Path:
        """Writes the video and returns its path. The name chooses the format: .mp4, .gif, .npy, .png, frames/."""
        with _own_names(output="path"):
            (target,) = media.check_output(path, dataclasses.replace(self.settings, num_videos=1))
        parts = (torch.from_numpy(frame).float().div(255)[None, None] for frame in self.frames)
        sound = None if self.sound is None else Waveform(torch.from_numpy(self.sound).unsqueeze(0), self.sample_rate)
        media.write_videos([target], parts, fps=self.settings.fps, metadata=[self.metadata], sound=sound)
        return target

    def numpy(self) -> np.ndarray:
        """uint8 [frames, height, width, 3]."""
        return self.frames

    def images(self) -> list[Image.Image]:
        return [Image.fromarray(frame) for frame in self.frames]

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        return f"<Video {width}×{height}, {count} frames, {self.settings.fps} fps, seed {self.settings.seed}>"


@dataclasses.dataclass(frozen=True)
class _Request:
    prompt: str
    settings: GenerationSettings
    given: GivenMedia
    on_progress: ProgressCallback


class Pipeline:
    """A model that is ready to be called. Used in a `with` block, it frees the devices' memory at the end.

    `stages` is the `VideoPipeline`, with encode, denoise and decode as separate methods.
    """

    def __init__(self, stages: VideoPipeline) -> None:
        self.stages = stages

    @overload
    def __call__(
        self,
        prompt: str,
        *,
        images: ImageLike | Sequence[ImageLike] | None = ...,
        lora: LoraLike | Sequence[LoraLike] | None = ...,
        preset: str | None = ...,
        checkpoint: str | Path | None = ...,
        checkpoint_every: int = ...,
        on_progress: ProgressCallback = ...,
        **settings: Unpack[CallSettings],
    ) -> Video: ...
    @overload
    def __call__(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        images: ImageLike | Sequence[ImageLike] | None = ...,
        lora: LoraLike | Sequence[LoraLike] | None = ...,
        preset: str | None = ...,
        checkpoint: str | Path | None = ...,
        checkpoint_every: int = ...,
        on_progress: ProgressCallback = ...,
        **settings: Unpack[CallSettings],
    ) -> list[Video]: ...
    def __call__(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        images: ImageLike | Sequence[ImageLike] | None = None,
        lora: LoraLike | Sequence[LoraLike] | None = None,
        preset: str | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        on_progress: ProgressCallback = ignore_progress,
        **settings: Any,
    ) -> Video | list[Video]:
        """Returns one video; for a list of prompts, or with num_videos over 1, a list of videos.

        `images`: the first frame and optionally the last, an image to start from, or reference images, as the model
        takes them. `settings`: also what else is given, see `Media`. `lora`: LoRAs for this call only. `preset`:
        settings that go together, such as "4step", where none are given; "auto": as the LoRA or the model says.
        `checkpoint`: a .safetensors file that the steps are saved to, every `checkpoint_every` of them and on SIGTERM;
        the same call goes on from there, and removes it at the end.
        `on_progress` is called with a `Progress` from this thread; an exception from it ends the run.
        """
        prompts = _as_prompts(prompt)
        saved = _open_checkpoint(checkpoint, checkpoint_every, len(prompts))
        self._use(lora, preset)
        videos: list[Video] = []
        for each in prompts:
            request = self._request(each, images, on_progress, settings)
            # Bytes at once: of a long video, float32 parts would take four times as much.
            sounds: list[Waveform] = []
            parts = [_as_bytes(part) for part in self._parts(request, sounds, saved)]
            videos += self._videos(request, np.concatenate(parts, axis=1), sounds)
        if saved is not None:
            saved.remove()
        return videos if not isinstance(prompt, str) or len(videos) > 1 else videos[0]

    async def stream(
        self,
        prompt: str,
        *,
        images: ImageLike | Sequence[ImageLike] | None = None,
        lora: LoraLike | Sequence[LoraLike] | None = None,
        preset: str | None = None,
        on_progress: ProgressCallback = ignore_progress,
        **settings: Unpack[CallSettings],
    ) -> AsyncIterator[np.ndarray]:
        """Yields the frames of one video as they are decoded, uint8 [height, width, 3]. Runs in another thread."""
        self._use(lora, preset)
        request = self._request(prompt, images, on_progress, settings)
        if request.settings.num_videos != 1:
            raise InvalidValueError(
                f"num_videos={request.settings.num_videos} cannot be streamed; ask for 1", field="num_videos"
            )
        parts = self._parts(request)
        try:
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                for frame in _as_bytes(part[0]):
                    yield frame
        finally:
            await asyncio.to_thread(parts.close)

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of each preset of the model, by its name."""
        return {name: preset.settings for name, preset in self.stages.preset.presets.items()}

    def settings(self, **chosen: Unpack[Settings]) -> GenerationSettings:
        """The model's defaults, replaced by the chosen values, checked."""
        return self.stages.settings(**{name: _plain(value) for name, value in chosen.items()})

    def close(self) -> None:
        """Frees the weights on the devices. A later call loads them again."""
        self.stages.running.unload()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        stages = self.stages
        return f"<Pipeline {stages.model_name}, {stages.family.name}, mesh {stages.placement.sizes}>"

    def _use(self, lora: LoraLike | Sequence[LoraLike] | None, preset: str | None) -> None:
        given: list[Any] = [] if lora is None else [lora]
        if isinstance(lora, Sequence) and not isinstance(lora, str | tuple):
            given = list(lora)
        self.stages.use_loras([_as_lora(each) for each in given], preset)

    def _request(
        self,
        prompt: str,
        images: ImageLike | Sequence[ImageLike] | None,
        on_progress: ProgressCallback,
        settings: Mapping[str, Any],
    ) -> _Request:
        chosen = {name: value for name, value in settings.items() if name not in Media.__annotations__}
        given = _read_media(images, {name: value for name, value in settings.items() if name not in chosen})
        stages = self.stages
        chosen = merge_choices(stages.preset.settings, chosen)
        if given.videos and chosen.get("num_frames") is None:
            rate = self.settings(**chosen).fps
            chosen["num_frames"] = choose_frames(given, stages.family.card, stages.defaults, rate)
        made = self.settings(**chosen)
        stages.warn_of_preset(made)
        return _Request(prompt, stages.settle_context(made, given.images), given, on_progress)

    def _parts(
        self, request: _Request, sounds: list[Waveform] | None = None, checkpoint: StepCheckpoint | None = None
    ) -> Generator[torch.Tensor, None, None]:
        """Yields frames [num_videos, t, height, width, 3] in 0..1, as they are decoded. `sounds` gets the sound of the
        videos, if the model makes one."""
        stages, settings = self.stages, request.settings
        before, stages.on_progress = stages.on_progress, request.on_progress
        try:
            with _own_names(image="images", reference="references"):
                embeddings = stages.encode(request.prompt, settings, request.given)
            latents = stages.denoise(embeddings, settings, checkpoint=checkpoint)
            if sounds is not None and (sound := stages.decode_sound(latents, settings)) is not None:
                sounds.append(sound)
            yield from stages.decode(latents, settings)
        finally:
            stages.on_progress = before

    def _videos(self, request: _Request, frames: np.ndarray, sounds: Sequence[Waveform]) -> list[Video]:
        described = artifacts.describe(
            request.prompt,
            request.settings,
            self.stages,
            images_fingerprint=request.given.fingerprint,
            loras=self.stages.loras.text,
            attention_window=self.stages.attention_window,
            quantization=self.stages.quantization,
            preset=self.stages.preset.name or "",
            tiny_vae=self.stages.tiny_vae,
        )
        videos = []
        for number, each in enumerate(frames):
            video = Video(each, request.prompt, request.settings, {**described, "video": str(number)})
            for sound in sounds:
                video = dataclasses.replace(video, sound=sound.samples[number].numpy(), sample_rate=sound.rate)
            videos.append(video)
        return videos


def open(
    model: str | Path | SingleFiles = "demo",
    runtime: RuntimeConfig = RuntimeConfig(),
    *,
    on_progress: ProgressCallback = ignore_progress,
) -> Pipeline:
    """Opens a demo model, a directory in diffusers' layout, single files (`SingleFiles`), or a model by its hub id,
    which is downloaded if needed.

    Weights are loaded and programs compiled at the first call.
    """
    return Pipeline(VideoPipeline.open(model, runtime, on_progress=on_progress))


@contextlib.contextmanager
def _own_names(**names: str) -> Iterator[None]:
    """Errors that name a parameter of this interface, where the stages call it otherwise."""
    try:
        yield
    except InvalidValueError as error:
        text, field = str(error), error.field or ""
        name = names.get(field)
        if name is None or not text.startswith((f"{field}=", f"{field} ")):
            raise
        raise type(error)(f"{name}{text.removeprefix(field)}", field=name) from error


def _as_prompts(given: Any) -> list[str]:
    """Checked before the first of them is generated."""
    prompts = list(given) if isinstance(given, list | tuple) else [given]
    if not prompts:
        raise InvalidValueError("prompt is an empty list; give one prompt or more", field="prompt")
    for each in prompts:
        if not isinstance(each, str):
            raise InvalidValueError(
                f"prompt is a {type(each).__name__}, expected text or a list of texts", field="prompt"
            )
    return prompts


def _open_checkpoint(path: str | Path | None, every: int, prompts: int) -> StepCheckpoint | None:
    if path is None:
        return None
    if prompts > 1:
        raise InvalidValueError(
            f"checkpoint={path} holds the steps of one prompt, and there are {prompts}; call it once for each, with a "
            "file of its own",
            field="checkpoint",
        )
    if Path(path).suffix != artifacts.SUFFIX:
        raise InvalidValueError(
            f"checkpoint={path} is for tensors; give it a name in {artifacts.SUFFIX}", field="checkpoint"
        )
    checkpoint = StepCheckpoint(Path(path), every)
    checkpoint.check()
    return checkpoint


def _as_lora(given: LoraLike) -> Lora:
    if isinstance(given, Lora):
        return given
    if isinstance(given, str | Path):
        return Lora(Path(given))
    if isinstance(given, tuple) and len(given) == 2:
        return Lora(Path(given[0]), _plain(given[1]))
    raise InvalidValueError(f"lora is {given!r}, expected a path or (path, strength)", field="lora")


def _read_media(images: Any, given: Mapping[str, Any]) -> GivenMedia:
    videos = {name: _as_video(given[name], name) for name in VIDEO_NAMES if given.get(name) is not None}
    strengths = given.get("control_strength")
    if strengths is not None and not isinstance(strengths, list | tuple):
        strengths = [strengths]
    with _own_names(image="images", reference="references"):
        return GivenMedia(
            tuple(_as_image(each, "images") for each in _as_sequence(images)),
            tuple(_as_image(each, "references") for each in _as_sequence(given.get("references"))),
            videos,
            _plain(given.get("strength")),
            None if strengths is None else tuple(map(_plain, strengths)),
        )


def _as_sequence(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _as_video(given: Any, name: str) -> VideoSource:
    if isinstance(given, str | Path):
        return open_video(Path(given), name)
    if isinstance(given, Image.Image):
        return Frames(np.asarray(as_rgb(given))[None], is_picture=True)
    if isinstance(given, list | tuple):
        if not given:
            raise InvalidValueError(f"{name} is an empty list; give one frame or more", field=name)
        images = [np.asarray(as_rgb(_as_image(each, name))) for each in given]
        if len({each.shape for each in images}) > 1:
            raise InvalidValueError(f"{name} has frames of several sizes; give frames of one", field=name)
        return Frames(np.stack(images))
    if not isinstance(given, np.ndarray | torch.Tensor):
        raise InvalidValueError(
            f"{name} is a {type(given).__name__}, expected a path, a list of images or an array", field=name
        )
    pixels = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if pixels.ndim == 3 and name == "mask":
        pixels = np.repeat(pixels[..., None], 3, axis=3)
    if pixels.ndim != 4 or pixels.shape[3] != 3 or not pixels.size:
        raise InvalidValueError(
            f"{name} is an array of shape {pixels.shape}, expected (frames, height, width, 3)", field=name
        )
    return Frames(_as_uint8(pixels, name), is_picture=name == "mask" and len(pixels) == 1)


def _as_image(given: ImageLike, name: str) -> Image.Image:
    if isinstance(given, Image.Image):
        return given
    if isinstance(given, str | Path):
        return read_image(Path(given), "reference" if name == "references" else "image")
    if not isinstance(given, np.ndarray | torch.Tensor):
        raise InvalidValueError(
            f"{name} holds a {type(given).__name__}, expected a path, a PIL image or an array", field=name
        )
    pixels = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidValueError(
            f"{name} holds an array of shape {pixels.shape}, expected (height, width, 3)", field=name
        )
    return Image.fromarray(_as_uint8(pixels, name))


def _as_uint8(pixels: np.ndarray, name: str) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    # Compared, because NaN is in no range.
    if not np.issubdtype(pixels.dtype, np.floating) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise InvalidValueError(
            f"{name} holds {pixels.dtype} values, expected uint8, or floats from 0 to 1", field=name
        )
    return np.round(pixels * 255).astype(np.uint8)


def _as_bytes(frames: torch.Tensor) -> np.ndarray:
    return frames.clamp(0, 1).mul(255).round().byte().numpy()


def _plain(value: Any) -> Any:
    """A Python number for one of numpy's."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if is_scalar else value
