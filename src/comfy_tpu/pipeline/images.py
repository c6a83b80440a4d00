"""Given images (first and last frames, reference images): reading, resizing, conversion to tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline.image_files import IMAGE_ERRORS, describe_format, open_image_file, quiet_images

SIDE_MAX = 16384
"""An image with a longer side is refused before it is decoded or resized."""
PIXELS_MAX = 89_478_485
"""An image with more pixels is refused before it is decoded: 256 MiB in RGB, where Pillow warns of a bomb."""


def read_image(path: Path, field: str = "image") -> Image.Image:
    """Reads an image as RGB, rotated by its EXIF tag. Transparency is dropped, as ComfyUI's Load Image does.

    Only the first image of an animation or of a file with several pages is read. `field`: its name in errors.
    """
    if not path.is_file():
        raise InvalidValueError(f"{field}={path} is not a file; give an image such as first.png", field=field)
    try:
        with quiet_images(), open_image_file(path) as image:
            if max(image.size) > SIDE_MAX:
                raise InvalidValueError(
                    f"{field}={path} is {image.width}×{image.height}, more than {SIDE_MAX} on a side; make it smaller",
                    field=field,
                )
            if image.width * image.height > PIXELS_MAX:
                raise InvalidValueError(
                    f"{field}={path} is {image.width}×{image.height}, more than {PIXELS_MAX} pixels; make it smaller",
                    field=field,
                )
            if image.mode == "F":  # of no agreed range: PIL would make 0..1 black
                raise InvalidValueError(
                    f"{field}={path} has floating-point pixels; save it as a PNG or JPEG", field=field
                )
            return as_rgb(ImageOps.exif_transpose(image))
    except ComfyTpuError:
        raise
    except Image.DecompressionBombError as error:
        raise InvalidValueError(
            f"{field}={path} has more than {PIXELS_MAX} pixels ({error}); make it smaller", field=field
        ) from error
    except IMAGE_ERRORS as error:
        reason = describe_format(path) if isinstance(error, UnidentifiedImageError) else error
        raise InvalidValueError(
            f"{field}={path} cannot be read as an image ({reason}); give a PNG or JPEG", field=field
        ) from error


def fingerprint(images: Sequence[Image.Image]) -> str:
    """A fingerprint of the images' pixels; empty without images."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.mode} {image.size};".encode() + image.tobytes())
    return digest.hexdigest()[:16] if images else ""


def as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, which PIL would cut off at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if isinstance(image.info.get("transparency"), bytes):  # of a palette, of which PIL warns otherwise
        image = image.convert("RGBA")
    return image.convert("RGB")


def crop_to_frame(image: Image.Image, settings: GenerationSettings) -> Image.Image:
    """Resizes an image until it covers the frame, and crops its center, with diffusers' rounding."""
    width, height = settings.width, settings.height
    if width / height > image.width / image.height:
        size = width, image.height * width // image.width
    else:
        size = image.width * height // image.height, height
    if max(size) > SIDE_MAX:
        raise InvalidValueError(
            f"image is {image.width}×{image.height}, too long to fill {width}×{height}; cut a piece out of it",
            field="image",
        )
    left, top = width // 2 - size[0] // 2, height // 2 - size[1] // 2
    frame = Image.new("RGB", (width, height))
    frame.paste(image.resize(size, resample=Image.Resampling.LANCZOS), box=(left, top))
    return frame


def as_image(frame: torch.Tensor) -> Image.Image:
    """An image of a decoded frame, [height, width, 3] in 0..1."""
    return Image.fromarray(as_bytes(frame))


def as_bytes(frames: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Decoded frames in 0..1, of any shape, in a quarter of their memory."""
    made: npt.NDArray[np.uint8] = frames.clamp(0, 1).mul(255).round().byte().numpy()
    return made


def as_values(processor: Any, images: Sequence[Image.Image]) -> torch.Tensor:
    """The inputs of the image encoder, [images, 3, side, side], by its processor."""
    values: torch.Tensor = processor(images=list(images), return_tensors="pt").pixel_values
    return values
