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

from comfy_tpu.config import INIT_IMAGE_STRENGTH, GenerationSettings, Lora, RuntimeConfig, SingleFiles
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.settings import merge_choices
from comfy_tpu.pipeline import artifacts, media
from comfy_tpu.pipeline.images import as_frame, fingerprint, read_image
from comfy_tpu.pipeline.progress import ProgressCallback, ignore_progress
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.video import VideoPipeline

LoraLike: TypeAlias = "str | Path | tuple[str | Path, float] | Lora"
"""A .safetensors file, alone (strength 1) or with a strength."""

ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray | torch.Tensor"
"""A file, a PIL image, or pixels [height, width, 3]: uint8, or floats in 0..1."""


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
    images: tuple[Image.Image, ...]
    strength: float | None
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
        strength: float | None = ...,
        lora: LoraLike | Sequence[LoraLike] | None = ...,
        preset: str | None = ...,
        on_progress: ProgressCallback = ...,
        **settings: Unpack[Settings],
    ) -> Video: ...
    @overload
    def __call__(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        images: ImageLike | Sequence[ImageLike] | None = ...,
        strength: float | None = ...,
        lora: LoraLike | Sequence[LoraLike] | None = ...,
        preset: str | None = ...,
        on_progress: ProgressCallback = ...,
        **settings: Unpack[Settings],
    ) -> list[Video]: ...
    def __call__(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        images: ImageLike | Sequence[ImageLike] | None = None,
        strength: float | None = None,
        lora: LoraLike | Sequence[LoraLike] | None = None,
        preset: str | None = None,
        on_progress: ProgressCallback = ignore_progress,
        **settings: Any,
    ) -> Video | list[Video]:
        """Returns one video; for a list of prompts, or with num_videos over 1, a list of videos.

        `images`: the first frame and optionally the last, an image to start from, or reference images, as the model
        takes them. `strength`: the share of an image to start from that is replaced. `lora`: LoRAs for this call only.
        `preset`: settings that go together, such as "4step", where none are given; "auto": as the LoRA or the model
        says. `on_progress` is called with a `Progress` from this thread; an exception from it ends the run.
        """
        prompts = _as_prompts(prompt)
        self._use(lora, preset)
        videos: list[Video] = []
        for each in prompts:
            request = self._request(each, images, strength, on_progress, settings)
            # Bytes at once: of a long video, float32 parts would take four times as much.
            sounds: list[Waveform] = []
            parts = [_as_bytes(part) for part in self._parts(request, sounds)]
            videos += self._videos(request, np.concatenate(parts, axis=1), sounds)
        return videos if not isinstance(prompt, str) or len(videos) > 1 else videos[0]

    async def stream(
        self,
        prompt: str,
        *,
        images: ImageLike | Sequence[ImageLike] | None = None,
        strength: float | None = None,
        lora: LoraLike | Sequence[LoraLike] | None = None,
        preset: str | None = None,
        on_progress: ProgressCallback = ignore_progress,
        **settings: Unpack[Settings],
    ) -> AsyncIterator[np.ndarray]:
        """Yields the frames of one video as they are decoded, uint8 [height, width, 3]. Runs in another thread."""
        self._use(lora, preset)
        request = self._request(prompt, images, strength, on_progress, settings)
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
        strength: float | None,
        on_progress: ProgressCallback,
        settings: Mapping[str, Any],
    ) -> _Request:
        chosen = self.settings(**merge_choices(self.stages.preset.settings, settings))
        self.stages.warn_of_preset(chosen)
        given: list[Any] = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        with _own_names(image="images"):
            chosen = self.stages.settle_context(chosen, given)
            return _Request(prompt, chosen, tuple(map(_as_image, given)), _plain(strength), on_progress)

    def _parts(self, request: _Request, sounds: list[Waveform] | None = None) -> Generator[torch.Tensor, None, None]:
        """Yields frames [num_videos, t, height, width, 3] in 0..1, as they are decoded. `sounds` gets the sound of the
        videos, if the model makes one."""
        stages, settings = self.stages, request.settings
        before, stages.on_progress = stages.on_progress, request.on_progress
        try:
            init_image, images = None, request.images
            if images and stages.family.card.starts_from_image:
                (image, *others), images = images, ()
                if others:
                    raise InvalidValueError(
                        f"images has {1 + len(others)} entries; {stages.model_name} starts from one", field="images"
                    )
                strength = INIT_IMAGE_STRENGTH if request.strength is None else request.strength
                init_image = stages.encode_init_image(as_frame(image, settings), settings, strength)
            elif request.strength is not None:
                raise InvalidValueError(
                    f"strength={request.strength} is for an image that denoising starts from; give images, and a model "
                    "that starts from one",
                    field="strength",
                )
            with _own_names(image="images"):
                embeddings = stages.encode(request.prompt, settings, images)
            latents = stages.denoise(embeddings, settings, init_image)
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
            images_fingerprint=fingerprint(request.images),
            loras=self.stages.loras.text,
            attention_window=self.stages.attention_window,
            quantization=self.stages.quantization,
            preset=self.stages.preset.name or "",
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


def _as_lora(given: LoraLike) -> Lora:
    if isinstance(given, Lora):
        return given
    if isinstance(given, str | Path):
        return Lora(Path(given))
    if isinstance(given, tuple) and len(given) == 2:
        return Lora(Path(given[0]), _plain(given[1]))
    raise InvalidValueError(f"lora is {given!r}, expected a path or (path, strength)", field="lora")


def _as_image(given: ImageLike) -> Image.Image:
    if isinstance(given, Image.Image):
        return given
    if isinstance(given, str | Path):
        return read_image(Path(given))
    if not isinstance(given, np.ndarray | torch.Tensor):
        raise InvalidValueError(
            f"images holds a {type(given).__name__}, expected a path, a PIL image or an array", field="images"
        )
    pixels = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidValueError(
            f"images holds an array of shape {pixels.shape}, expected (height, width, 3)", field="images"
        )
    if pixels.dtype == np.uint8:
        return Image.fromarray(pixels)
    # Compared, because NaN is in no range.
    if not np.issubdtype(pixels.dtype, np.floating) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise InvalidValueError(
            f"images holds {pixels.dtype} values, expected uint8, or floats from 0 to 1", field="images"
        )
    return Image.fromarray(np.round(pixels * 255).astype(np.uint8))


def _as_bytes(frames: torch.Tensor) -> np.ndarray:
    return frames.clamp(0, 1).mul(255).round().byte().numpy()


def _plain(value: Any) -> Any:
    """A Python number for one of numpy's."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if is_scalar else value
