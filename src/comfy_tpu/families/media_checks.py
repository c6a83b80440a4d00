"""Checks of given images and videos against a card: which of them a model takes, how many, and how long they are.

Nothing is read here, so that a server and a node can refuse what no run would accept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard, VideoInput
from comfy_tpu.families.settings import check_images

_SAME_SHAPE = 0.01
"""The difference of two aspect ratios that may be of rounding."""


@dataclasses.dataclass(frozen=True)
class GivenVideo:
    """What is known of a video before it is read."""

    frames: int
    size: tuple[int, int]
    """Width and height."""
    is_picture: bool = False
    """Whether it is one picture, which stands for all frames of a mask."""


def check_media(
    model: str,
    card: ModelCard,
    images: int,
    references: int,
    videos: Mapping[str, GivenVideo],
    settings: GenerationSettings,
) -> None:
    """Raises InvalidValueError unless the model takes so many images and references, and these videos."""
    check_references(model, card, references)
    check_video_names(model, card, videos)
    check_images(model, card.image, images, settings)
    if images and videos and card.image is not None and card.image.role == "first_frame":
        name = next(iter(videos))
        raise InvalidValueError(
            f"image is given beside {name}, whose frames it would replace; give one of them", field="image"
        )
    first = next((videos[each.name] for each in card.videos if each.name in videos and each.role != "mask"), None)
    for each in card.videos:
        if each.name in videos and first is not None:
            _check_length(each, videos, first, settings)
            _check_shape(each, videos)


def check_references(model: str, card: ModelCard, count: int) -> None:
    if count and not card.max_references:
        raise InvalidValueError(
            f"reference is given, but model {model} takes no reference images; leave it out", field="reference"
        )
    if count > card.max_references:
        raise InvalidValueError(
            f"reference is given {count} times, but model {model} takes {card.max_references} at most; leave the "
            "others out",
            field="reference",
        )


def check_video_names(model: str, card: ModelCard, videos: Mapping[str, object]) -> None:
    """Raises InvalidValueError for a video that the model does not take, or that is missing."""
    known = {each.name for each in card.videos}
    for name in videos:
        if name not in known:
            takes = f"takes {' and '.join(sorted(known))}" if known else "takes no video"
            raise InvalidValueError(f"{name} is given, but model {model} {takes}; leave it out", field=name)
    for each in card.videos:
        if each.required and each.name not in videos:
            raise InvalidValueError(
                f"{each.name} is missing: model {model} needs {each.words}; give it", field=each.name
            )
        for other in each.needs:
            if each.name in videos and other not in videos:
                raise InvalidValueError(
                    f"{each.name} is given without {other}; give {other} too, or leave {each.name} out",
                    field=each.name,
                )


def _check_length(
    each: VideoInput, videos: Mapping[str, GivenVideo], first: GivenVideo, settings: GenerationSettings
) -> None:
    given = videos[each.name]
    if each.role == "mask":
        partner = videos[each.needs[0]] if each.needs else first
        if not given.is_picture and given.frames != partner.frames:
            raise InvalidValueError(
                f"{each.name} has {_frames(given)} and {each.needs[0] if each.needs else 'the video'} "
                f"{partner.frames}; give as many, or one picture for all frames",
                field=each.name,
            )
        return
    if given is not first and given.frames != first.frames:
        name = next(name for name, video in videos.items() if video is first)
        raise InvalidValueError(
            f"{each.name} has {_frames(given)} and {name} {first.frames}; give videos of the same length",
            field=each.name,
        )
    if given.frames < settings.num_frames and not each.may_be_shorter:
        raise InvalidValueError(
            f"{each.name} has {_frames(given)} at {settings.fps} a second, and num_frames={settings.num_frames} "
            f"are to be made; ask for {given.frames} or fewer, or give a longer video",
            field=each.name,
        )


def _frames(given: GivenVideo) -> str:
    return f"{given.frames} frame{'s' * (given.frames != 1)}"


def _check_shape(each: VideoInput, videos: Mapping[str, GivenVideo]) -> None:
    """Raises InvalidValueError for a mask that cannot lie on its video."""
    if each.role != "mask" or not each.needs:
        return
    (width, height), (other_width, other_height) = videos[each.name].size, videos[each.needs[0]].size
    if abs(width * other_height / (height * other_width) - 1) > _SAME_SHAPE:
        raise InvalidValueError(
            f"{each.name} is {width}×{height} and {each.needs[0]} {other_width}×{other_height}; give a mask of the "
            "same size, or of the same shape",
            field=each.name,
        )
