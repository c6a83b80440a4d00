"""Files of a form as the images and videos that a model takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from PIL import Image, ImageOps

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES, ModelCard
from comfy_tpu.families.settings import make_settings
from comfy_tpu.jobs.opening import read_media
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline.given_media import follow_media
from comfy_tpu.pipeline.images import read_image
from comfy_tpu.pipeline.media_fitting import check_given
from comfy_tpu.serving.served_model import ServedModel
from comfy_tpu.serving.shapes import media_shape
from comfy_tpu.serving.uploads import REFERENCE, Upload

_GRID, _SIDE_MIN = 64, 512
"""Pixels. Images of a million of them have about 24 shapes on the grid; smaller ones would lose too much to it."""


def sort_uploads(card: ModelCard, uploads: Sequence[Upload]) -> dict[str, list[Upload]]:
    """The files by field of a request. `input_reference` is a reference where a model takes some beside other images,
    else an image as OpenAI's API has it."""
    fields: dict[str, list[Upload]] = {}
    for upload in uploads:
        name = upload.given
        if name == REFERENCE:
            name = "reference" if card.max_references else "image"
        fields.setdefault(name, []).append(upload)
    return fields


def check_uploads(
    request: Request, model: ServedModel, uploads: Sequence[Upload]
) -> tuple[Request, tuple[Hashable, ...]]:
    """The request, with the length and size that follow from its files, and the shape of these; raises
    InvalidValueError for files that the model does not take. They lie where they were received."""
    given = read_media({**request.values, **_places(sort_uploads(model.card, uploads))})
    chosen = model.chosen_settings(request.values)
    followed = follow_media(chosen, given, model.card, model.defaults)
    sizes = {name: value for name, value in followed.items() if name not in chosen and value is not None}
    request = Request({**request.values, **sizes})
    settings = make_settings(model.defaults, model.chosen_settings(request.values), model.card.limits)
    try:
        check_given(model.card, given, settings, model.name)
    except InvalidValueError as error:
        field = error.field or ""
        if field not in VIDEO_NAMES or not str(error).startswith(field):
            raise
        raise InvalidValueError(f"input_{error}", field=f"input_{field}") from error
    model.passes(request.values, given)
    return request, media_shape(model, given)


def fit_references(model: ServedModel, uploads: Sequence[Upload]) -> None:
    """Crops images whose sizes decide the shape of a step to sides of a coarse grid. Each upload was a shape of its own
    otherwise, which is compiled for a minute. Raises InvalidValueError for an image that the model does not take."""
    media = None if model.files is None else model.files.family.media
    if media is None or media.fit_reference is None:
        return
    for upload in uploads:
        if upload.given in VIDEO_NAMES:
            continue
        image = media.fit_reference(read_image(upload.path))
        width, height = (side - side % _GRID for side in image.size)
        if min(width, height) >= _SIDE_MIN and (width, height) != image.size:
            ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS).save(upload.path, "PNG", compress_level=1)


def _places(files: Mapping[str, Sequence[Upload]]) -> dict[str, list[str]]:
    return {name: [str(upload.path) for upload in given] for name, given in files.items()}
