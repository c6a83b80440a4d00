"""What a client sends: JSON or a form, and images in it, within limits."""

from __future__ import annotations

import io
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.json_input import parse_json
from comfy_tpu.serving.config import Limits

_IMAGE_FIELDS = ("image", "image[]", "input_reference")
_FORMATS = ("PNG", "JPEG", "WEBP")
_NO_ADDRESSES = "images are files of a form here; addresses are not fetched"


async def read_body(request: Request, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
    """The fields, and the images. Raises InvalidValueError for what is no such thing."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        return await _read_form(request, limits)
    if kind not in ("application/json", ""):
        raise InvalidValueError(f"content-type {kind[:60]} is not understood; send JSON or a form")
    try:
        body = parse_json(await _read_json(request, limits.json_bytes) or b"{}")
    except ValueError:
        raise InvalidValueError("the body is no JSON") from None
    if not isinstance(body, dict):
        raise InvalidValueError("the body is JSON, but no object")
    if any(body.get(name) for name in _IMAGE_FIELDS):
        raise InvalidValueError(_NO_ADDRESSES, field="image")
    return body, []


async def _read_json(request: Request, most: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise HTTPException(413, f"the body has more than {most} bytes of JSON")
    return bytes(content)


async def _read_form(request: Request, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
    body: dict[str, Any] = {}
    images: list[bytes] = []
    try:
        async with request.form(max_files=limits.images, max_fields=100) as form:
            for name, value in form.multi_items():
                if not isinstance(value, UploadFile):
                    if name in _IMAGE_FIELDS:
                        raise InvalidValueError(_NO_ADDRESSES, field=name)
                    body[name] = [*_as_list(body[name]), value] if name in body else value
                elif name not in _IMAGE_FIELDS:
                    raise InvalidValueError(f"{name[:40]} is no file of this API; leave it out", field=name)
                else:
                    images.append(await value.read())
    except (HTTPException, MultiPartException, UnicodeError, ValueError) as error:
        if isinstance(error, InvalidValueError):
            raise
        if "Too many files" in str(error):
            raise InvalidValueError(
                f"more than {limits.images} images are given; leave some out", field="image"
            ) from error
        raise InvalidValueError("the form cannot be read, or has too many fields") from error
    for content in images:
        await run_in_threadpool(check_image, content, limits)  # 16 million pixels take a while to decode
    return body, images


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_image(content: bytes, limits: Limits) -> None:
    """Raises InvalidValueError for what is no image of a known kind, or a huge one. Nothing is decoded before."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            is_small = width * height <= limits.image_pixels and max(width, height) <= limits.image_side
            is_animated = image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False)
            if is_small and not is_animated:
                image.load()
    except Exception as error:
        raise InvalidValueError("an image is damaged, or neither PNG, JPEG nor WebP", field="image") from error
    if is_animated:
        raise InvalidValueError("an image is animated; send one of its frames", field="image")
    if not is_small:
        raise InvalidValueError(
            f"an image has {width}×{height} pixels, and {limits.image_pixels} are the most, {limits.image_side} on a "
            "side; send a smaller one",
            field="image",
        )
