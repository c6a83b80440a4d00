"""From the values of a request, or of a command line, to what a pipeline is opened and called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from comfy_tpu.config import (
    INIT_IMAGE_STRENGTH,
    VAE_BACKEND,
    AttentionConfig,
    CacheConfig,
    FastSettings,
    GenerationSettings,
    RuntimeConfig,
    SingleFiles,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.registry import model_cards
from comfy_tpu.families.settings import merge_choices
from comfy_tpu.kernels.windows import parse_blocks, parse_window
from comfy_tpu.pipeline.images import as_frame, read_image
from comfy_tpu.pipeline.init_image import InitImage
from comfy_tpu.pipeline.video import VideoPipeline

SETTINGS = tuple(field.name for field in dataclasses.fields(GenerationSettings))


def make_runtime(values: Mapping[str, Any]) -> RuntimeConfig:
    """The runtime of the chosen values; what is missing has its default."""
    cache = values.get("cache_dir")
    dump = values.get("dump")
    fast = values.get("fast")  # a request has it as JSON
    return RuntimeConfig(
        mesh=values.get("mesh", "auto"),
        platform=values.get("platform", "auto"),
        dtype=values.get("dtype", "auto"),
        quantize=values.get("quantize"),
        fast=FastSettings(**fast) if isinstance(fast, Mapping) else fast,
        vae_backend=values.get("vae_backend", VAE_BACKEND),
        attention=_make_attention(values),
        cache=CacheConfig(directory=None if cache is None else Path(cache)),
        dump=None if dump is None else Path(dump),
    )


def _make_attention(values: Mapping[str, Any]) -> AttentionConfig:
    defaults = AttentionConfig()
    return AttentionConfig(
        implementation=values.get("attention", defaults.implementation),
        block_sizes=parse_blocks(values.get("attention_blocks", "auto")),
        dense_max_tokens=values.get("dense_max_tokens", defaults.dense_max_tokens),
        window=parse_window(values.get("attention_window", "full")),
    )


def choose_settings(
    values: Mapping[str, Any], sizes: Mapping[str, Mapping[str, Any]], preset: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """The chosen settings by field of GenerationSettings. Single values override those of a preset, and these those of
    a size, whose flow shift is for many steps."""
    chosen: dict[str, Any] = {}
    if size := values.get("size"):
        if str(size).upper() not in sizes:
            raise InvalidValueError(
                f"size={size} is unknown; choose from {', '.join(sorted(sizes)) or 'none'}", field="size"
            )
        chosen.update(sizes[str(size).upper()])
    said = {field: values[field] for field in SETTINGS if values.get(field) is not None}
    return chosen | merge_choices(preset, said)


def choose_model(values: Mapping[str, Any]) -> str | SingleFiles | None:
    """The model: a name, single files, or None where nothing is chosen."""
    parts = {name: values.get(name) or [] for name in ("transformer", "text_encoder", "vae", "image_encoder")}
    if not any(parts.values()):
        return values.get("model")
    for name in ("transformer", "text_encoder", "vae"):
        if not parts[name]:
            raise InvalidValueError(
                f"{name} is missing: a model in single files is given by --transformer, --text-encoder and --vae",
                field=name,
            )
    for name in ("vae", "image_encoder"):
        if len(parts[name]) > 1:
            raise InvalidValueError(f"{name} is given {len(parts[name])} times; a model has one", field=name)
    image_encoder = next(iter(parts["image_encoder"]), None)
    return SingleFiles(
        tuple(map(Path, parts["transformer"])),
        tuple(map(Path, parts["text_encoder"])),
        Path(parts["vae"][0]),
        None if image_encoder is None else Path(image_encoder),
        values.get("model"),
    )


def read_images(values: Mapping[str, Any]) -> list[Image]:
    """The given images; the last frame comes last."""
    last = values.get("last_image")
    given = values.get("image") or []
    if last is not None and not given:
        raise InvalidValueError("last_image is given without a first one; give --image too", field="last_image")
    return [read_image(Path(path)) for path in (*given, *(() if last is None else (last,)))]


def check_last_image(values: Mapping[str, Any], pipeline: VideoPipeline) -> None:
    if values.get("last_image") is None:
        return
    if pipeline.limits.frames_max == 1:
        raise InvalidValueError("last_image is for videos; leave it out", field="last_image")
    takes = pipeline.family.card.image
    if takes is not None and takes.last_image == "no":
        raise InvalidValueError(
            f"last_image is given, but model {pipeline.model_name} takes a first image only; leave it out",
            field="last_image",
        )


def encode_init_image(
    values: Mapping[str, Any], pipeline: VideoPipeline, images: Sequence[Image], settings: GenerationSettings
) -> tuple[InitImage | None, Sequence[Image]]:
    """The image that denoising starts from, where the model takes one; and the images that the model reads."""
    strength = values.get("strength")
    starts = pipeline.family.card.starts_from_image
    if strength is not None and not (starts and images):
        able = [card.name for card in model_cards() if card.starts_from_image]
        raise InvalidValueError(
            f"strength={strength} is for an image that denoising starts from; give --image too, and a model such "
            f"as {able[0]}",
            field="strength",
        )
    if not starts or not images:
        return None, images
    if len(images) > 1:
        raise InvalidValueError(
            f"image is given {len(images)} times, but model {pipeline.model_name} starts from one image; "
            "leave the others out",
            field="image",
        )
    share: float = INIT_IMAGE_STRENGTH if strength is None else strength
    return pipeline.encode_init_image(as_frame(images[0], settings), settings, share), ()
