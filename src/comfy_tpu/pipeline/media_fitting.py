"""Brings given images and videos into the sizes and the length of a result, after a check that the model takes them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import torch
from PIL import Image

from comfy_tpu.config import CONTROL_STRENGTH, GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Config, ModelCard, VideoInput
from comfy_tpu.families.media import FittedMedia
from comfy_tpu.families.media_checks import GivenVideo, check_media
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.pipeline.given_media import GivenMedia, read_frames
from comfy_tpu.pipeline.images import as_rgb, crop_to_frame
from comfy_tpu.pipeline.initial import check_strength, default_strength
from comfy_tpu.pipeline.video_files import VideoSource

logger = logging.getLogger(__name__)

_STRETCHED = 0.02
"""Aspect ratios that differ by more are worth a warning."""


def fit_media(
    family: ModelFamily, config: Config, given: GivenMedia, settings: GenerationSettings, model: str
) -> FittedMedia:
    """Reads the given media in the sizes and the length of the result. Raises InvalidValueError for what the model does
    not take. `config`: the transformer's; `model`: its name in messages."""
    card = family.card
    given = check_given(card, given, settings, model)
    control = _control_strengths(family, config, given)
    read = {
        video.name: _read_video(given.videos[video.name], video, config, settings)
        for video in card.videos
        if video.name in given.videos
    }
    for name in [name for name in read if given.videos[name].is_picture]:
        length = max(len(frames) for frames in read.values())
        read[name] = read[name].expand(length, *read[name].shape[1:])
    return FittedMedia(
        tuple(_fit_images(family, given.images, settings)),
        tuple(as_rgb(image) for image in given.references),
        read,
        control,
    )


def _control_strengths(family: ModelFamily, config: Config, given: GivenMedia) -> tuple[float, ...]:
    """A strength for each layer of the control."""
    strengths = given.control_strength or (CONTROL_STRENGTH,)
    layers = family.media.control_layers(config) if family.media is not None else 1
    if len(strengths) not in (1, layers):
        raise InvalidValueError(
            f"control_strength has {len(strengths)} numbers, and the model's control {layers} layers; give one number, "
            f"or {layers}",
            field="control_strength",
        )
    return strengths * layers if len(strengths) == 1 else strengths


def check_given(card: ModelCard, given: GivenMedia, settings: GenerationSettings, model: str) -> GivenMedia:
    """The media as the model takes them; raises InvalidValueError for what it does not take. Reads no video."""
    if card.takes_references:
        given = dataclasses.replace(given, images=(*given.images, *given.references), references=())
    videos = {name: _describe(source, settings.fps) for name, source in given.videos.items()}
    check_media(model, card, len(given.images), len(given.references), videos, settings)
    _check_strengths(card, given, settings, model)
    return given


def _fit_images(family: ModelFamily, images: Sequence[Image.Image], settings: GenerationSettings) -> list[Image.Image]:
    """RGB images in the sizes that the family takes. Those that are stretched to the frame keep their sizes here."""
    images = [as_rgb(image) for image in images]
    if family.media is not None and family.media.fit_reference is not None:
        return [family.media.fit_reference(image) for image in images]
    if family.media is not None and family.media.fit_frame is not None:
        return [family.media.fit_frame(image, settings) for image in images]
    crops = family.card.image is not None and family.card.image.resize == "crop"
    return [crop_to_frame(image, settings) for image in images] if crops else images


def _describe(source: VideoSource, fps: float) -> GivenVideo:
    return GivenVideo(source.count(fps), source.size, source.is_picture)


def _check_strengths(card: ModelCard, given: GivenMedia, settings: GenerationSettings, model: str) -> None:
    starts = (card.starts_from_image and given.images) or (card.starts_from_video and given.videos)
    if starts:
        strength = default_strength(card) if given.strength is None else given.strength
        check_strength(card, strength, settings)
    elif given.strength is not None:
        raise InvalidValueError(
            f"strength={given.strength} is for an image or a video that denoising starts from; give one, and a model "
            "that starts from it",
            field="strength",
        )
    if given.control_strength is None:
        return
    if not card.has_control_strength:
        raise InvalidValueError(
            f"control_strength is given, but model {model} reads no control beside its prompt; leave it out",
            field="control_strength",
        )
    if not all(isinstance(each, (int, float)) and 0 <= each <= 10 for each in given.control_strength):
        shown = ", ".join(map(str, given.control_strength))
        raise InvalidValueError(
            f"control_strength={shown} is no number from 0 to 10, nor one for each layer", field="control_strength"
        )


def _read_video(source: VideoSource, video: VideoInput, config: Config, settings: GenerationSettings) -> torch.Tensor:
    """uint8 [frames, height, width, 3], or without the colours of a mask."""
    size = _frame_size(video, config, settings)
    _warn_of_stretching(source, video.name, size, settings)
    frames = read_frames(source, video.name, settings, size, is_mask=video.role == "mask")
    _warn_of_cut(source, video.name, settings)
    return frames


def _frame_size(video: VideoInput, config: Config, settings: GenerationSettings) -> tuple[int, int]:
    if not video.side_key:
        return settings.width, settings.height
    return config[video.side_key], config[video.side_key]


def _warn_of_stretching(source: VideoSource, name: str, size: tuple[int, int], settings: GenerationSettings) -> None:
    (given_width, given_height), (width, height) = source.size, size
    ratio = given_width / given_height
    if abs(ratio / (width / height) - 1) <= _STRETCHED:
        return
    advice = "crop it to a square"
    if size == (settings.width, settings.height):
        rows = max(round(math.sqrt(width * height / ratio) / 16), 1) * 16
        columns = max(round(math.sqrt(width * height * ratio) / 16), 1) * 16
        if (columns, rows) == size:
            return
        advice = f"ask for width={columns} and height={rows}, or crop it"
    logger.warning(
        "%s is %d×%d and is stretched to %d×%d; %s", name, *source.size, *size, advice, extra={"field": name}
    )


def _warn_of_cut(source: VideoSource, name: str, settings: GenerationSettings) -> None:
    count = source.count(settings.fps)
    if count > settings.num_frames + 3:  # up to three make no whole latent
        logger.warning(
            "%s has %d frames at %d a second; the first %d are used",
            name,
            count,
            settings.fps,
            settings.num_frames,
            extra={"field": name},
        )
