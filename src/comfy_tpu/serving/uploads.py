"""What a client sends: JSON or a form, and images and videos in it, within limits."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO, Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline.video_files import open_video
from comfy_tpu.serving.config import Limits

REFERENCE = "input_reference"
"""The name of OpenAI's API for an image: the first frame, or a reference for models that take some beside it."""
IMAGE_FIELDS = {"image": "image", "image[]": "image", REFERENCE: REFERENCE}
VIDEO_FIELDS = {f"input_{name}": name for name in VIDEO_NAMES}
FILE_FIELDS: Mapping[str, str] = {**IMAGE_FIELDS, **VIDEO_FIELDS}
"""Fields of a form that are files -> what is given."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_NO_ADDRESSES = "images and videos are files of a form here; addresses are not fetched"
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True)
class Upload:
    """A file of a form, which lies in a directory of the server."""

    given: str
    """A value of FILE_FIELDS."""
    path: Path
    digest: str


@contextlib.asynccontextmanager
async def read_body(
    request: Request, limits: Limits, directory: Path
) -> AsyncIterator[tuple[dict[str, Any], list[Upload]]]:
    """The fields, and the files, which are written to `directory` and removed at the end of the block unless somebody
    moved them. Raises InvalidValueError for what is no such thing."""
    uploads: list[Upload] = []
    try:
        yield await _read_fields(request, limits, directory, uploads), uploads
    finally:
        for upload in uploads:
            upload.path.unlink(missing_ok=True)


async def _read_fields(request: Request, limits: Limits, directory: Path, uploads: list[Upload]) -> dict[str, Any]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        return await _read_form(request, limits, directory, uploads)
    if kind not in ("application/json", ""):
        raise InvalidValueError(f"content-type {kind[:60]} is not understood; send JSON or a form")
    try:
        body = parse_json(await _read_json(request, limits.json_bytes) or b"{}")
    except ValueError:
        raise InvalidValueError("the body is no JSON") from None
    if not isinstance(body, dict):
        raise InvalidValueError("the body is JSON, but no object")
    for name in FILE_FIELDS:
        if body.get(name):
            raise InvalidValueError(_NO_ADDRESSES, field="image" if name in IMAGE_FIELDS else name)
    return body


async def _read_json(request: Request, most: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise HTTPException(413, f"the body has more than {most} bytes of JSON")
    return bytes(content)


async def _read_form(request: Request, limits: Limits, directory: Path, uploads: list[Upload]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    try:
        async with request.form(max_files=limits.images + len(VIDEO_FIELDS), max_fields=100) as form:
            for name, value in form.multi_items():
                if not isinstance(value, UploadFile):
                    if name in FILE_FIELDS:
                        raise InvalidValueError(_NO_ADDRESSES, field=name)
                    body[name] = [*_as_list(body[name]), value] if name in body else value
                elif name not in FILE_FIELDS:
                    raise InvalidValueError(f"{name[:40]} is no file of this API; leave it out", field=name)
                else:
                    path = directory / f"upload-{secrets.token_hex(12)}"
                    uploads.append(Upload(FILE_FIELDS[name], path, ""))
                    digest = await run_in_threadpool(_write, value.file, path)
                    uploads[-1] = dataclasses.replace(uploads[-1], digest=digest)
    except (HTTPException, MultiPartException, UnicodeError, ValueError) as error:
        if isinstance(error, InvalidValueError):
            raise
        if "Too many files" in str(error):
            raise _too_many(limits) from error
        raise InvalidValueError("the form cannot be read, or has too many fields") from error
    images = [upload for upload in uploads if upload.given not in VIDEO_NAMES]
    if len(images) > limits.images:
        raise _too_many(limits)
    for upload in uploads:  # 16 million pixels take a while to decode
        check = check_image if upload in images else check_video
        await run_in_threadpool(check, upload, limits)
    return body


def _too_many(limits: Limits) -> InvalidValueError:
    return InvalidValueError(f"more than {limits.images} images are given; leave some out", field="image")


def _write(source: IO[bytes], path: Path) -> str:
    digest = hashlib.sha256()
    source.seek(0)
    with path.open("wb") as file:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_image(upload: Upload, limits: Limits) -> None:
    """Raises InvalidValueError for what is no image of a known kind, or a huge one. Nothing is decoded before."""
    try:
        with Image.open(upload.path, formats=_FORMATS) as image:
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


def check_video(upload: Upload, limits: Limits) -> None:
    """Raises InvalidValueError for what is no video, nor a picture for a mask, or is over the limits. Its times are
    read, and one picture is decoded."""
    field = f"input_{upload.given}"
    try:
        video = open_video(upload.path, field, animations=False)
    except InvalidValueError as error:  # without the place of the file
        reason = str(error).replace(f"{field}={upload.path}", field)
        raise InvalidValueError(reason, field=field) from error
    width, height = video.size
    if width * height > limits.image_pixels:
        raise InvalidValueError(
            f"{field} has pictures of {width}×{height} pixels, and {limits.image_pixels} are the most; send a smaller "
            "one",
            field=field,
        )
    if video.seconds > limits.video_seconds:
        raise InvalidValueError(
            f"{field} takes {video.seconds:.0f} seconds, and {limits.video_seconds:g} are the most; cut a piece out of "
            "it",
            field=field,
        )
    if video.pictures > limits.video_frames:
        raise InvalidValueError(
            f"{field} has {video.pictures} pictures, and {limits.video_frames} are the most; cut a piece out of it",
            field=field,
        )
