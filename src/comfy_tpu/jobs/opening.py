"""From the values of a request, or of a command line, to what a pipeline is opened and called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import (
    VAE_BACKEND,
    AttentionConfig,
    CacheConfig,
    FastSettings,
    GenerationSettings,
    RuntimeConfig,
    SingleFiles,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.families.settings import merge_choices
from comfy_tpu.kernels.windows import parse_blocks, parse_window
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.images import read_image
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import VideoSource, open_video

SETTINGS = tuple(field.name for field in dataclasses.fields(GenerationSettings))


def make_runtime(values: Mapping[str, Any]) -> RuntimeConfig:
    """The runtime of the chosen values; what is missing has its default."""
    cache = values.get("cache_dir")
    dump = values.get("dump")
    tiny = values.get("tiny_vae")
    fast = values.get("fast")  # a request has it as JSON
    return RuntimeConfig(
        mesh=values.get("mesh", "auto"),
        platform=values.get("platform", "auto"),
        dtype=values.get("dtype", "auto"),
        quantize=values.get("quantize"),
        fast=FastSettings(**fast) if isinstance(fast, Mapping) else fast,
        vae_backend=values.get("vae_backend", VAE_BACKEND),
        tiny_vae=None if tiny is None else Path(tiny),
        attention=_make_attention(values),
        ignored_config_keys=tuple(values.get("ignore_config_key") or ()),
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


def read_media(values: Mapping[str, Any]) -> GivenMedia:
    """The given images and videos; the last frame is the last of the images. Videos are opened, and read later."""
    last = values.get("last_image")
    images = _as_list(values.get("image"))
    if last is not None and not images:
        raise InvalidValueError("last_image is given without a first one; give --image too", field="last_image")
    videos: dict[str, VideoSource] = {}
    for name in VIDEO_NAMES:
        paths = _as_list(values.get(name))
        if len(paths) > 1:
            raise InvalidValueError(f"{name} is given {len(paths)} times; give one", field=name)
        if paths:
            videos[name] = open_video(Path(paths[0]), name)
    return GivenMedia(
        tuple(read_image(Path(path)) for path in (*images, *_as_list(last))),
        tuple(read_image(Path(path), "reference") for path in _as_list(values.get("reference"))),
        videos,
        values.get("strength"),
        parse_strengths(values.get("control_strength")),
    )


def parse_strengths(given: Any) -> tuple[float, ...] | None:
    """ "0.8" or "1,0.8,0.6" as numbers, one for all layers or one for each; a number or a list as it is."""
    if given is None or given == "":
        return None
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    try:
        return tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        raise InvalidValueError(
            f"control_strength={str(given)[:60]} is neither a number nor numbers with commas between them",
            field="control_strength",
        ) from None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


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
