"""Images and videos that are given beside a prompt, as a user gave them. Needs no jax: clients of a server send it."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.shared.sizes import target_size
from comfy_tpu.pipeline.images import fingerprint
from comfy_tpu.pipeline.video_files import VideoSource


@dataclasses.dataclass(frozen=True)
class GivenMedia:
    images: tuple[Image.Image, ...] = ()
    """First and last frames, an image to start from, or references, as the model takes them."""
    references: tuple[Image.Image, ...] = ()
    """Images that are references whatever else the model takes."""
    videos: Mapping[str, VideoSource] = dataclasses.field(default_factory=dict)
    """By the names of `card.VIDEO_NAMES`."""
    strength: float | None = None
    """The share of an image or video to start from that is replaced. None, here and below: the default."""
    control_strength: tuple[float, ...] | None = None
    """The effect of control videos and references: one number, or one for each layer of the control."""

    def __bool__(self) -> bool:
        return bool(self.images or self.references or self.videos)

    @property
    def fingerprint(self) -> str:
        """Of the pixels of images, the content of videos, and the strengths; empty where nothing is given."""
        if not self:
            return ""
        own = fingerprint(self.images)
        if not (self.references or self.videos or self.strength or self.control_strength):
            return own
        digest = hashlib.sha256(
            f"{own} {fingerprint(self.references)} {self.strength} {self.control_strength}".encode()
        )
        for name, video in sorted(self.videos.items()):
            digest.update(name.encode() + video.digest())
        return digest.hexdigest()[:16]


NO_MEDIA = GivenMedia()


def as_given(given: GivenMedia | Sequence[Image.Image]) -> GivenMedia:
    """Images alone, as most models take them, are media too."""
    return given if isinstance(given, GivenMedia) else GivenMedia(tuple(given))


def choose_frames(given: GivenMedia, card: ModelCard, defaults: GenerationSettings, fps: float) -> int | None:
    """The number of frames that follows from the given videos, where nobody chose one: as many as the first of them
    has, and no more than the model makes by default. None: the model's default."""
    found = [given.videos[video.name] for video in card.videos if video.name in given.videos and video.role != "mask"]
    if not found or found[0].is_picture:
        return None
    step = card.limits.frames_multiple
    return min(max(found[0].count(fps) - 1, 0) // step * step + 1, defaults.num_frames)


def follow_media(
    chosen: Mapping[str, Any], given: GivenMedia, card: ModelCard, defaults: GenerationSettings
) -> dict[str, Any]:
    """The chosen settings, with the number of frames of a given video and the size of a given image where none is
    chosen."""
    said = {name: value for name, value in chosen.items() if value not in (None, "")}
    followed = follow_image(card, given.images)
    if given.videos and "num_frames" not in said:
        fps = said.get("fps")
        rate = fps if isinstance(fps, int | float) and fps > 0 else defaults.fps  # odd values are refused with others
        followed["num_frames"] = choose_frames(given, card, defaults, rate)
    return {**chosen, **followed, **said}


def follow_image(card: ModelCard, images: Sequence[Image.Image]) -> dict[str, Any]:
    """Width and height of a result that has the shape of the last image; empty where the model has its own."""
    if card.image is None or not card.image.result_area or not images:
        return {}
    return dict(zip(("width", "height"), target_size(*images[-1].size, card.image.result_area), strict=True))


def read_frames(
    source: VideoSource, field: str, settings: GenerationSettings, size: tuple[int, int], *, is_mask: bool = False
) -> torch.Tensor:
    """The frames of a video at the rate of a result, no more than it has, stretched to width and height: uint8 [frames,
    height, width, 3], or without the colours of a mask."""
    width, height = size
    count = min(source.count(settings.fps), settings.num_frames)
    frames = np.empty((count, height, width, *(() if is_mask else (3,))), np.uint8)
    done = 0
    for image in itertools.islice(source.frames(settings.fps), count):
        picture = image.convert("L") if is_mask else image
        if picture.size != (width, height):
            picture = picture.resize((width, height), Image.Resampling.LANCZOS)
        frames[done] = np.asarray(picture)
        done += 1
    if done < count:
        raise InvalidValueError(
            f"{field}={source.name} is damaged: {done} of {count} frames can be read; give another file", field=field
        )
    return torch.from_numpy(frames)
