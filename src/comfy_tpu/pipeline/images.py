"""Given images (first and last frames, reference images): reading, resizing, conversion to tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline.image_files import describe_format, open_image_file

_SIDE_MAX = 16384
"""An image with a longer side is refused before it is decoded or resized."""
_PIXELS_MAX = 89_478_485
"""An image with more pixels is refused before it is decoded: 256 MiB in RGB, where Pillow warns of a bomb."""


def read_image(path: Path) -> Image.Image:
    """Reads an image as RGB, rotated by its EXIF tag. Transparency is dropped, as ComfyUI's Load Image does.

    Only the first image of an animation or of a file with several pages is read.
    """
    if not path.is_file():
        raise InvalidValueError(f"image={path} is not a file; give an image such as first.png", field="image")
    try:
        with open_image_file(path) as image:
            if max(image.size) > _SIDE_MAX:
                raise InvalidValueError(
                    f"image={path} is {image.width}×{image.height}, more than {_SIDE_MAX} on a side; make it smaller",
                    field="image",
                )
            if image.width * image.height > _PIXELS_MAX:
                raise InvalidValueError(
                    f"image={path} is {image.width}×{image.height}, more than {_PIXELS_MAX} pixels; make it smaller",
                    field="image",
                )
            if image.mode == "F":  # of no agreed range: PIL would make 0..1 black
                raise InvalidValueError(
                    f"image={path} has floating-point pixels; save it as a PNG or JPEG", field="image"
                )
            return as_rgb(ImageOps.exif_transpose(image))
    except ComfyTpuError:
        raise
    except Image.DecompressionBombError as error:
        raise InvalidValueError(
            f"image={path} has more than {_PIXELS_MAX} pixels ({error}); make it smaller", field="image"
        ) from error
    # PIL's readers also let through what Python says of a damaged header or of a kind that they do not know.
    except (OSError, SyntaxError, ValueError, NotImplementedError) as error:
        reason = describe_format(path) if isinstance(error, UnidentifiedImageError) else error
        raise InvalidValueError(
            f"image={path} cannot be read as an image ({reason}); give a PNG or JPEG", field="image"
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
    if max(size) > _SIDE_MAX:
        raise InvalidValueError(
            f"image is {image.width}×{image.height}, too long to fill {width}×{height}; cut a piece out of it",
            field="image",
        )
    left, top = width // 2 - size[0] // 2, height // 2 - size[1] // 2
    frame = Image.new("RGB", (width, height))
    frame.paste(image.resize(size, resample=Image.Resampling.LANCZOS), box=(left, top))
    return frame


def as_frame(image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
    """[1, height, width, 3] in 0..1, stretched to the frame as diffusers does."""
    fitted = image.resize((settings.width, settings.height), resample=Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted, dtype=np.float32) / 255.0).unsqueeze(0)


def as_image(frame: torch.Tensor) -> Image.Image:
    """An image of a decoded frame, [height, width, 3] in 0..1."""
    return Image.fromarray(frame.clamp(0, 1).mul(255).round().byte().numpy())


def as_pixels(image: Image.Image) -> torch.Tensor:
    """[1, 3, 1, height, width] in -1..1, in the image's own size."""
    values = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0)
    return (values.permute(2, 0, 1) * 2.0 - 1.0)[None, :, None]


def as_values(processor: Any, images: Sequence[Image.Image]) -> torch.Tensor:
    """The inputs of the image encoder, [images, 3, side, side], by its processor."""
    values: torch.Tensor = processor(images=list(images), return_tensors="pt").pixel_values
    return values


def video_parts(
    images: Sequence[Image.Image], settings: GenerationSettings, temporal_scale: int
) -> Iterator[torch.Tensor]:
    """Yields a video [1, 3, frames, height, width] that is gray except for the given images, in the parts that a VAE
    encodes: the first frame, then as many frames at a time as a latent holds."""
    first, *last = (as_frame(image, settings)[0].permute(2, 0, 1) * 2.0 - 1.0 for image in images)
    yield first[None, :, None]
    count = (settings.num_frames - 1) // temporal_scale
    for index in range(count):
        part = torch.zeros(1, 3, temporal_scale, settings.height, settings.width)
        if last and index == count - 1:
            part[0, :, -1] = last[0]
        yield part
