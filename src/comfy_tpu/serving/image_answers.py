"""Images inside an answer, in the format that the client asked for."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from comfy_tpu.errors import InvalidValueError

FIELDS = ("output_format", "output_compression")
_FORMATS = ("png", "jpeg", "webp")
_QUALITY = 100
"""Of JPEG and WebP where none is asked for, as OpenAI's."""


@dataclasses.dataclass(frozen=True)
class ImageFormat:
    name: str = "png"
    quality: int = _QUALITY

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ImageFormat:
        """Raises InvalidValueError for fields that make no format."""
        name, quality = body.get("output_format") or "png", body.get("output_compression")
        if name not in _FORMATS:
            raise InvalidValueError(
                f"output_format={str(name)[:40]!r} is unknown; choose from {', '.join(_FORMATS)}", field="output_format"
            )
        if quality in (None, ""):
            return cls(name)
        if isinstance(quality, bool) or not str(quality).isdecimal() or not 0 <= int(str(quality)[:9]) <= 100:
            raise InvalidValueError(
                f"output_compression={str(quality)[:40]!r} is not a whole number from 0 to 100",
                field="output_compression",
            )
        if name == "png" and int(quality) != 100:
            raise InvalidValueError(
                "output_compression is of jpeg and webp; leave it out, or choose one of them",
                field="output_compression",
            )
        return cls(name, int(quality))

    def encode(self, path: Path) -> str:
        """The image of a PNG file, in base64."""
        content = path.read_bytes()
        if self.name != "png":
            buffer = io.BytesIO()
            with Image.open(io.BytesIO(content)) as image:
                image.convert("RGB").save(buffer, self.name.upper(), quality=self.quality)
            content = buffer.getvalue()
        return base64.b64encode(content).decode()


def refuse_format(body: Mapping[str, Any]) -> None:
    """Raises InvalidValueError where a format is asked for that a file will not have."""
    for name in FIELDS:
        if body.get(name) not in (None, "", "png"):
            raise InvalidValueError(
                f"{name} is of the images in an answer (/v1/images/generations); leave it out", field=name
            )
