"""What the OpenAPI schema says of bodies, which the routes read themselves, and of answers."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from comfy_tpu.config import GenerationSettings, UpscaleBy
from comfy_tpu.serving.orders import FIXED, HINTS, SAME_FIELDS
from comfy_tpu.serving.uploads import IMAGE_FIELDS, VIDEO_FIELDS

_TYPES: dict[type, dict[str, Any]] = {
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
    str: {"type": "string"},
}
_SETTINGS: dict[str, dict[str, Any]] = {
    field.name: _TYPES[type(field.default)] for field in dataclasses.fields(GenerationSettings)
}


def _as_json(text: str) -> str | bool | int:
    """A value as JSON has it, of a field that is text in a form."""
    return {"false": False, "0": 0}.get(text, text)


_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "description": "As /v1/models has it; the first one, if none is named."},
    "prompt": {"type": "string", "minLength": 1, "maxLength": 10_000},
    "size": {"type": "string", "description": "832x480, 480P as the model has it, or auto."},
    "seconds": {"type": ["string", "number"], "description": "Becomes the nearest number of frames."},
    "preset": {"type": "string", "description": "As /v1/models has it, or auto."},
    "lora": {"type": ["string", "array"], "items": {"type": "string"}, "description": "NAME[:STRENGTH][:high|low|all]"},
    "control_strength": {"type": ["string", "number"], "description": "Of videos and references; or of each layer."},
    **_SETTINGS,
    **{name: _SETTINGS[field] for name, field in SAME_FIELDS.items()},
    "strength": {
        "type": "number",
        "description": "How much of the image or video is redrawn, where a model starts from one.",
    },
    "upscale": {
        "type": "number",
        "description": "A second pass makes both sides so many times as long; the next three are of it.",
    },
    "upscale_strength": {"type": "number", "description": "The share of its steps that is run."},
    "upscale_steps": {"type": "integer", "description": "Its steps; 0: as many as the first pass has."},
    "upscale_by": {"enum": list(get_args(UpscaleBy))},
    "user": {"type": "string", "description": "Of OpenAI's API; changes nothing."},
    **{
        name: {"enum": list(values), "description": "Of OpenAI's API; changes nothing."}
        for name, values in HINTS.items()
    },
    **{name: {"enum": [_as_json(each) for each in values]} for name, values in FIXED.items()},
}
_ANSWER_FIELDS = {
    "output_format": {"enum": ["png", "jpeg", "webp"]},
    "output_compression": {"type": "integer", "minimum": 0, "maximum": 100, "description": "Of jpeg and webp."},
}
_FILES: dict[str, dict[str, Any]] = {
    **{
        name: {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "PNG, JPEG or WebP."}
        for name in IMAGE_FIELDS
    },
    **{
        name: {"type": "string", "format": "binary", "description": "A video file, of models that take one."}
        for name in VIDEO_FIELDS
    },
}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 255},
    "description": "The same request with the same key is one job.",
}
_NULLABLE_NUMBER = {"type": ["number", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_JOB_FIELDS: dict[str, dict[str, Any]] = {
    "id": {"type": "string"},
    "object": {"enum": ["video", "image"]},
    "model": {"type": "string"},
    "status": {"enum": ["queued", "in_progress", "completed", "failed"]},
    "progress": {"type": "integer", "minimum": 0, "maximum": 100},
    "created_at": {"type": "integer"},
    "completed_at": {"type": ["integer", "null"]},
    "expires_at": {"type": ["integer", "null"]},
    "size": {"type": "string"},
    "seconds": {"type": "string"},
    "prompt": {"type": "string"},
    "error": {"type": ["object", "null"]},
    "stage": {"type": "string"},
    "has_image": {"type": "boolean"},
    "has_video": {"type": "boolean"},
    "settings": {"type": "object"},
    "second_pass": {
        "type": ["object", "null"],
        "description": "Scale, strength, steps and by.",
    },
    "estimated_seconds": _NULLABLE_NUMBER,
}
JOB: dict[str, Any] = {"type": "object", "required": list(_JOB_FIELDS), "properties": _JOB_FIELDS}
JOB_WITH_WAIT: dict[str, Any] = {
    **JOB,
    "required": [*_JOB_FIELDS, "estimated_wait_seconds"],
    "properties": {**_JOB_FIELDS, "estimated_wait_seconds": _NULLABLE_NUMBER},
}
JOB_LIST: dict[str, Any] = {
    "type": "object",
    "required": ["object", "data", "has_more", "first_id", "last_id"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": JOB},
        "has_more": {"type": "boolean"},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
    },
}
DELETED: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "deleted"],
    "properties": {"id": {"type": "string"}, "object": {"type": "string"}, "deleted": {"const": True}},
}
IMAGES: dict[str, Any] = {
    "type": "object",
    "required": ["created", "data", "id", "output_format"],
    "properties": {
        "created": {"type": "integer"},
        "data": {
            "type": "array",
            "items": {"type": "object", "required": ["b64_json"], "properties": {"b64_json": {"type": "string"}}},
        },
        "id": {"type": "string"},
        "output_format": {"enum": ["png", "jpeg", "webp"]},
    },
}
_STAGE_FIELDS: dict[str, dict[str, Any]] = {
    "id": {"type": "string"},
    "object": {"const": "stage"},
    "stage": {"enum": ["encode", "denoise", "decode", "decode_sound"]},
    "model": {"type": "string"},
    "status": {"enum": ["queued", "in_progress", "completed", "failed", "cancelled"]},
    "created_at": {"type": "integer"},
    "progress": {"type": ["object", "null"]},
    "error": {"type": ["object", "null"]},
}
STAGE: dict[str, Any] = {"type": "object", "required": list(_STAGE_FIELDS), "properties": _STAGE_FIELDS}


def _content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "Refused: 400 what the model does not take, 401 the key, 403 a page of another site, 404 there "
        "is no such thing, 405 no such method, 408 too slow, 409 not now, 413 too large, 429 the queue is full.",
        **_content("application/json", _ERROR),
    },
    "503": {
        "description": "No job can be carried out, or the ledger cannot be written.",
        **_content("application/json", _ERROR),
    },
}
"""Of every route."""
FAILED_JOB: dict[int | str, dict[str, Any]] = {
    "500": {"description": "The image could not be made.", **_content("application/json", _ERROR)}
}


def answer(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers JSON."""
    return {"200": {"description": "OK", **_content("application/json", schema)}}


def file(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with a file, or with a part of it."""
    content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in media_types}
    return {
        "200": {"description": "The file", "content": content},
        "206": {"description": "A part", "content": content},
    }


def events() -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with server-sent events."""
    event = {"type": "object", "required": ["data"], "properties": {"event": _TYPES[str], "data": _TYPES[str]}}
    return {"200": {"description": "Each has a job in JSON", **_content("text/event-stream", event)}}


def order_body(*, is_answered: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that takes an order. `is_answered`: the images are in the answer."""
    fields = {**_FIELDS, **_ANSWER_FIELDS} if is_answered else _FIELDS
    order = {"type": "object", "required": ["prompt"], "properties": fields, "additionalProperties": False}
    form = {**order, "properties": {**fields, **_FILES}}
    content = {"application/json": {"schema": order}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}, "parameters": [_KEY]}


def stage_body() -> dict[str, Any]:
    """`openapi_extra` of a route that takes a stage's input."""
    content = {"application/x-safetensors": {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}, "parameters": [_KEY]}
