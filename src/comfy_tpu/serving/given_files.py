"""Files of a form as the images and videos that a model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES, ModelCard
from comfy_tpu.families.settings import make_settings
from comfy_tpu.jobs.opening import add_frames, read_media
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline.media_fitting import check_given
from comfy_tpu.serving.served_model import ServedModel
from comfy_tpu.serving.uploads import REFERENCE, Upload


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


def check_uploads(request: Request, model: ServedModel, uploads: Sequence[Upload]) -> Request:
    """The request, with the length that follows from its videos; raises InvalidValueError for files that the model does
    not take. They lie where they were received."""
    given = read_media({**request.values, **_places(sort_uploads(model.card, uploads))})
    chosen = model.chosen_settings(request.values)
    frames = add_frames(chosen, given, model.card, model.defaults).get("num_frames")
    if frames is not None:
        request = Request({**request.values, "num_frames": frames})
    settings = make_settings(model.defaults, model.chosen_settings(request.values), model.card.limits)
    try:
        check_given(model.card, given, settings, model.name)
    except InvalidValueError as error:
        field = error.field or ""
        if field not in VIDEO_NAMES or not str(error).startswith(field):
            raise
        raise InvalidValueError(f"input_{error}", field=f"input_{field}") from error
    model.passes(request.values, given)
    return request


def _places(files: Mapping[str, Sequence[Upload]]) -> dict[str, list[str]]:
    return {name: [str(upload.path) for upload in given] for name, given in files.items()}
