"""A model that is ready to be called."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload

import numpy as np
import torch

from comfy_tpu.config import GenerationSettings, RuntimeConfig, SecondPass, SingleFiles
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.facade.calls import CallSettings, ImageLike, LoraLike, Media, Settings, Upscale
from comfy_tpu.facade.given import as_lora, as_prompts, open_checkpoints, own_names, plain_number, read_media
from comfy_tpu.facade.video import Video
from comfy_tpu.families.settings import merge_choices
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.given_media import GivenMedia, follow_media
from comfy_tpu.pipeline.initial import INITIAL, read_strength
from comfy_tpu.pipeline.progress import ProgressCallback, ignore_progress
from comfy_tpu.pipeline.second_pass import check_second_pass, denoise_again, describe_second_pass, read_second_pass
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.video import VideoPipeline

_MEDIA, _UPSCALE = tuple(Media.__annotations__), tuple(Upscale.__annotations__)


@dataclasses.dataclass(frozen=True)
class _Request:
    prompt: str
    settings: GenerationSettings
    given: GivenMedia
    on_progress: ProgressCallback
    second: SecondPass | None
    result: GenerationSettings
    """`settings`, or those of the second pass."""


@dataclasses.dataclass
class _Made:
    """What comes with the frames of a result."""

    sound: Waveform | None = None
    strength: dict[str, str] = dataclasses.field(default_factory=dict)
    """For the metadata, where denoising started from an image or a video."""


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
        takes them. `settings`: also what else is given, see `Media`, and a second pass, see `Upscale`. `lora`: LoRAs
        for this call only. `preset`: settings that go together, such as "4step", where none are given; "auto": as the
        LoRA or the model says.
        `checkpoint`: a .safetensors file that the steps are saved to, every `checkpoint_every` of them and on SIGTERM;
        the same call goes on from there, and removes it at the end. A second pass has a file of its own beside it.
        `on_progress` is called with a `Progress` from this thread; an exception from it ends the run.
        """
        prompts = as_prompts(prompt)
        has_second = settings.get("upscale") is not None
        saved = open_checkpoints(checkpoint, checkpoint_every, len(prompts), has_second=has_second)
        self._use(lora, preset)
        videos: list[Video] = []
        for each in prompts:
            request = self._request(each, images, on_progress, settings)
            # Bytes at once: of a long video, float32 parts would take four times as much.
            made = _Made()
            parts = [_as_bytes(part) for part in self._parts(request, made, saved)]
            videos += self._videos(request, np.concatenate(parts, axis=1), made)
        for checkpoint_file in saved:
            checkpoint_file.remove()
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
        return self.stages.settings(**{name: plain_number(value) for name, value in chosen.items()})

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
        self.stages.use_loras([as_lora(each) for each in given], preset)

    def _request(
        self,
        prompt: str,
        images: ImageLike | Sequence[ImageLike] | None,
        on_progress: ProgressCallback,
        settings: Mapping[str, Any],
    ) -> _Request:
        chosen = {name: value for name, value in settings.items() if name not in (*_MEDIA, *_UPSCALE)}
        given = read_media(images, {name: settings[name] for name in _MEDIA if name in settings})
        second = read_second_pass({name: plain_number(settings.get(name)) for name in _UPSCALE})
        stages = self.stages
        chosen = {name: plain_number(value) for name, value in merge_choices(stages.preset.settings, chosen).items()}
        chosen = follow_media(chosen, given, stages.card, stages.defaults)
        made = self.settings(**chosen)
        stages.warn_of_preset(made)
        made = result = stages.settle_context(made, given.images)
        if second is not None:
            result = check_second_pass(stages.card, stages.model_name, made, second, given)
        return _Request(prompt, made, given, on_progress, second, result)

    def _parts(
        self, request: _Request, made: _Made | None = None, checkpoints: Sequence[StepCheckpoint] = ()
    ) -> Generator[torch.Tensor, None, None]:
        """Yields frames [num_videos, t, height, width, 3] in 0..1, as they are decoded. `made` is filled before; None:
        the frames are enough. `checkpoints`: one for each pass; none: nothing is saved."""
        stages, settings = self.stages, request.settings
        first_steps, second_steps = (*checkpoints, None, None)[:2]
        before, stages.on_progress = stages.on_progress, request.on_progress
        try:
            with own_names(image="images", reference="references"):
                embeddings = stages.encode(request.prompt, settings, request.given)
            latents = stages.denoise(embeddings, settings, checkpoint=first_steps)
            if request.second is not None:
                latents, settings = denoise_again(
                    stages, embeddings, latents, settings, request.second, request.given, second_steps
                )
            if made is not None:
                made.sound = stages.decode_sound(latents, settings)
                if INITIAL in embeddings.shared:
                    made.strength = {"strength": str(read_strength(embeddings.shared))}
            yield from stages.decode(latents, settings)
        finally:
            stages.on_progress = before

    def _videos(self, request: _Request, frames: np.ndarray, made: _Made) -> list[Video]:
        second = request.second
        described = made.strength | artifacts.describe(
            request.prompt,
            request.result,
            self.stages,
            images_fingerprint=request.given.fingerprint,
            loras=self.stages.loras.text,
            attention_window=self.stages.attention_window,
            quantization=self.stages.quantization,
            preset=self.stages.preset.name or "",
            tiny_vae=self.stages.tiny_vae,
            second_pass="" if second is None else describe_second_pass(request.settings, second),
        )
        videos = []
        for number, each in enumerate(frames):
            video = Video(each, request.prompt, request.result, {**described, "video": str(number)})
            if made.sound is not None:
                samples, rate = made.sound.samples[number].numpy(), made.sound.rate
                video = dataclasses.replace(video, sound=samples, sample_rate=rate)
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


def _as_bytes(frames: torch.Tensor) -> np.ndarray:
    return frames.clamp(0, 1).mul(255).round().byte().numpy()
