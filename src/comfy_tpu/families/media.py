"""Given images and videos in the sizes that a model takes, and the pixels that its VAE encodes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config


@dataclasses.dataclass(frozen=True)
class Clip:
    """Pixels that a VAE encodes."""

    parts: Iterable[torch.Tensor]
    """[1, 3, frames, height, width] in -1..1, to be encoded one after the other: one frame first, then as many as a
    latent holds."""
    count: int
    """The number of parts, and so of latent frames."""


Clips = Mapping[str, Clip]


@dataclasses.dataclass(frozen=True)
class FittedMedia:
    images: tuple[Image.Image, ...] = ()
    """First and last frames, an image to start from, or the reference images of a model that takes nothing else."""
    references: tuple[Image.Image, ...] = ()
    """Reference images beside the others, in their own sizes."""
    videos: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """uint8 [frames, height, width, 3] by the names of the card's inputs; of a mask [frames, height, width]. As many
    frames as the result has, or fewer where the model goes on from a shorter one."""
    control_strength: tuple[float, ...] = (1.0,)
    """Of each layer of the control."""


def as_frame(image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
    """[1, height, width, 3] in 0..1, stretched to the frame as diffusers does."""
    fitted = image.resize((settings.width, settings.height), resample=Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted, dtype=np.float32) / 255.0).unsqueeze(0)


def as_pixels(image: Image.Image) -> torch.Tensor:
    """[1, 3, 1, height, width] in -1..1, in the image's own size."""
    values = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0)
    return (values.permute(2, 0, 1) * 2.0 - 1.0)[None, :, None]


def gray_video(images: Sequence[Image.Image], settings: GenerationSettings, temporal_scale: int) -> Clip:
    """A video that is gray except for the given images, its first frame and perhaps its last."""
    count = (settings.num_frames - 1) // temporal_scale

    def parts() -> Iterator[torch.Tensor]:
        first, *last = (as_frame(image, settings)[0].permute(2, 0, 1) * 2.0 - 1.0 for image in images)
        yield first[None, :, None]
        for index in range(count):
            part = torch.zeros(1, 3, temporal_scale, settings.height, settings.width)
            if last and index == count - 1:
                part[0, :, -1] = last[0]
            yield part

    return Clip(parts(), 1 + count)


def video_clip(frames: torch.Tensor, temporal_scale: int) -> Clip:
    """A video, uint8 [frames, height, width, 3]. Frames at its end that make no whole part are left out."""
    starts = (0, *range(1, len(frames) - temporal_scale + 1, temporal_scale))
    parts = (frames[start : start + (temporal_scale if start else 1)] for start in starts)
    return Clip((to_pixels(part) for part in parts), len(starts))


def to_pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 [frames, height, width, 3] -> [1, 3, frames, height, width] in -1..1."""
    return ((frames.float() / 255.0).permute(3, 0, 1, 2) * 2.0 - 1.0).unsqueeze(0)


def first_frame_clips(media: FittedMedia, settings: GenerationSettings, config: Config) -> Clips:
    """`MediaEncoding.clips` of models that see the first frame alone."""
    return {"video": gray_video(media.images[:1], dataclasses.replace(settings, num_frames=1), 1)}


def reference_clips(media: FittedMedia, settings: GenerationSettings, config: Config) -> Clips:
    """`MediaEncoding.clips` of models that see each image by itself, in its own size."""
    return {str(number): Clip((as_pixels(image),), 1) for number, image in enumerate(media.images)}
