"""From what a Python program gives, in any of its forms, to what the stages take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import SECOND_PASS, Lora
from comfy_tpu.errors import InvalidValueError, rename_field
from comfy_tpu.facade.calls import ImageLike, LoraLike
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.images import as_rgb, read_image
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.video_files import Frames, VideoSource, open_video


@contextlib.contextmanager
def own_names(**names: str) -> Iterator[None]:
    """Errors that name a parameter of this interface, where the stages call it otherwise."""
    try:
        yield
    except InvalidValueError as error:
        name = names.get(error.field or "")
        renamed = rename_field(str(error), error.field, name)
        if renamed == str(error):
            raise
        raise type(error)(renamed, field=name) from error


def as_prompts(given: Any) -> list[str]:
    """Checked before the first of them is generated."""
    prompts = list(given) if isinstance(given, list | tuple) else [given]
    if not prompts:
        raise InvalidValueError("prompt is an empty list; give one prompt or more", field="prompt")
    for each in prompts:
        if not isinstance(each, str):
            raise InvalidValueError(
                f"prompt is a {type(each).__name__}, expected text or a list of texts", field="prompt"
            )
    return prompts


def open_checkpoints(
    path: str | Path | None, every: int, prompts: int, *, has_second: bool
) -> tuple[StepCheckpoint, ...]:
    """One for each pass; empty where nothing is saved."""
    if path is None:
        return ()
    if prompts > 1:
        raise InvalidValueError(
            f"checkpoint={path} holds the steps of one prompt, and there are {prompts}; call it once for each, with a "
            "file of its own",
            field="checkpoint",
        )
    if Path(path).suffix != artifacts.SUFFIX:
        raise InvalidValueError(
            f"checkpoint={path} is for tensors; give it a name in {artifacts.SUFFIX}", field="checkpoint"
        )
    first = Path(path)
    paths = [first, first.with_suffix(f".{SECOND_PASS}{artifacts.SUFFIX}")] if has_second else [first]
    checkpoints = tuple(StepCheckpoint(each, every) for each in paths)
    for checkpoint in checkpoints:
        checkpoint.check()
    return checkpoints


def as_lora(given: LoraLike) -> Lora:
    if isinstance(given, Lora):
        return given
    if isinstance(given, str | Path):
        return Lora(Path(given))
    if isinstance(given, tuple) and len(given) == 2:
        return Lora(Path(given[0]), plain_number(given[1]))
    raise InvalidValueError(f"lora is {given!r}, expected a path or (path, strength)", field="lora")


def read_media(images: Any, given: Mapping[str, Any]) -> GivenMedia:
    videos = {name: _as_video(given[name], name) for name in VIDEO_NAMES if given.get(name) is not None}
    strengths = given.get("control_strength")
    if strengths is not None and not isinstance(strengths, list | tuple):
        strengths = [strengths]
    with own_names(image="images", reference="references"):
        return GivenMedia(
            tuple(_as_image(each, "images") for each in _as_sequence(images)),
            tuple(_as_image(each, "references") for each in _as_sequence(given.get("references"))),
            videos,
            plain_number(given.get("strength")),
            None if strengths is None else tuple(map(plain_number, strengths)),
        )


def _as_sequence(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _as_video(given: Any, name: str) -> VideoSource:
    if isinstance(given, str | Path):
        return open_video(Path(given), name)
    if isinstance(given, Image.Image):
        return Frames(np.asarray(as_rgb(given))[None], is_picture=True)
    if isinstance(given, list | tuple):
        if not given:
            raise InvalidValueError(f"{name} is an empty list; give one frame or more", field=name)
        images = [np.asarray(as_rgb(_as_image(each, name))) for each in given]
        if len({each.shape for each in images}) > 1:
            raise InvalidValueError(f"{name} has frames of several sizes; give frames of one", field=name)
        return Frames(np.stack(images))
    if not isinstance(given, np.ndarray | torch.Tensor):
        raise InvalidValueError(
            f"{name} is a {type(given).__name__}, expected a path, a list of images or an array", field=name
        )
    pixels = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if pixels.ndim == 3 and name == "mask":
        pixels = np.repeat(pixels[..., None], 3, axis=3)
    if pixels.ndim != 4 or pixels.shape[3] != 3 or not pixels.size:
        raise InvalidValueError(
            f"{name} is an array of shape {pixels.shape}, expected (frames, height, width, 3)", field=name
        )
    return Frames(_as_uint8(pixels, name), is_picture=name == "mask" and len(pixels) == 1)


def _as_image(given: ImageLike, name: str) -> Image.Image:
    if isinstance(given, Image.Image):
        return given
    if isinstance(given, str | Path):
        return read_image(Path(given), "reference" if name == "references" else "image")
    if not isinstance(given, np.ndarray | torch.Tensor):
        raise InvalidValueError(
            f"{name} holds a {type(given).__name__}, expected a path, a PIL image or an array", field=name
        )
    pixels = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidValueError(
            f"{name} holds an array of shape {pixels.shape}, expected (height, width, 3)", field=name
        )
    return Image.fromarray(_as_uint8(pixels, name))


def _as_uint8(pixels: np.ndarray, name: str) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    # Compared, because NaN is in no range.
    if not np.issubdtype(pixels.dtype, np.floating) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise InvalidValueError(
            f"{name} holds {pixels.dtype} values, expected uint8, or floats from 0 to 1", field=name
        )
    return np.round(pixels * 255).astype(np.uint8)


def plain_number(value: Any) -> Any:
    """A Python number for one of numpy's."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if is_scalar else value
