"""Checks of the user's settings, before any weight is loaded. Each error suggests a valid value."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, get_args

from comfy_tpu.config import (
    CONTEXT_OVERLAP,
    DEMO_IMAGE_MODEL,
    Context,
    ContextNoise,
    ContextSchedule,
    ContextWeights,
    GenerationSettings,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ImageInput, Limits, ModelCard
from comfy_tpu.families.tiles import check_tile


def make_settings(defaults: GenerationSettings, chosen: Mapping[str, Any], limits: Limits) -> GenerationSettings:
    """The model's defaults, replaced by the chosen values, checked. None and an empty text choose the model's own."""
    known = {field.name for field in dataclasses.fields(GenerationSettings)}
    if unknown := sorted(set(chosen) - known):
        raise InvalidValueError(
            f"{unknown[0]} is not a setting; choose from {', '.join(sorted(known))}", field=unknown[0]
        )
    chosen = {name: value for name, value in chosen.items() if value not in (None, "")}
    settings = dataclasses.replace(defaults, **{**_context_settings(chosen, limits), **chosen})
    if settings.sigmas and "num_inference_steps" not in chosen:
        settings = dataclasses.replace(settings, num_inference_steps=len(parse_sigmas(settings.sigmas)))
    check_settings(settings, limits)
    if limits.segment_overlaps and settings.context == "none":
        raise InvalidValueError(
            "context=none makes a video at once, and this model makes it segment by segment; leave it out, or give a "
            "larger context_frames",
            field="context",
        )
    settings = _with_own_context(settings, defaults.context_frames or defaults.num_frames, limits)
    check_settings(settings, limits)
    return settings


def merge_choices(preset: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a preset and the chosen ones (not None, nor an empty text), which go before them. A number of steps
    replaces the preset's noise levels, and noise levels its number of steps: each decides the other."""
    said = {name: value for name, value in chosen.items() if value not in (None, "")}
    if said.get("num_inference_steps", preset.get("num_inference_steps")) != preset.get("num_inference_steps"):
        preset = {name: value for name, value in preset.items() if name != "sigmas"}
    if "sigmas" in said and "num_inference_steps" not in said:
        preset = {name: value for name, value in preset.items() if name != "num_inference_steps"}
    return {**chosen, **preset, **said}


def parse_sigmas(text: str) -> tuple[float, ...]:
    """Noise levels from "1,0.75,0.5"; raises InvalidValueError unless they fall, from 1 at most, and stay above 0."""
    try:
        levels = tuple(float(part) for part in text.split(","))
    except (AttributeError, TypeError, ValueError):
        levels = ()
    if not levels or not all(0 < level <= 1 for level in levels) or sorted(set(levels), reverse=True) != list(levels):
        raise InvalidValueError(
            f"sigmas={str(text)[:60]!r} are not noise levels; give numbers that fall, from 1 at most to above 0: "
            "1,0.75,0.5,0.25",
            field="sigmas",
        )
    return levels


def guidance_scales(settings: GenerationSettings) -> tuple[float, float]:
    """The guidance scales of the first and the second transformer; without a boundary the second never runs."""
    second = settings.guidance_scale_2 if settings.boundary > 0 else 0.0
    return settings.guidance_scale, second or settings.guidance_scale


def _context_settings(chosen: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """What becomes of a model's own settings of windows: who chooses a schedule or a length chooses none of the others,
    which may not go with it. Segments have but one."""
    if ("context" not in chosen and "context_frames" not in chosen) or limits.segment_overlaps:
        return {}
    names = (field.name for field in dataclasses.fields(GenerationSettings) if field.name.startswith("context"))
    return {name: getattr(GenerationSettings, name) for name in names}


def _with_own_context(settings: GenerationSettings, own: int, limits: Limits) -> GenerationSettings:
    """The settings with the length and the overlap of windows in numbers, where none are chosen. `own`: the model's
    length."""
    frames = settings.context_frames or own
    if frames <= limits.frames_multiple:  # an image
        return settings
    default = limits.segment_overlaps[0] if limits.segment_overlaps else int(CONTEXT_OVERLAP * frames)
    overlap = default if settings.context_overlap < 0 else settings.context_overlap
    return dataclasses.replace(settings, context_frames=frames, context_overlap=overlap)


def settings_of_latents(
    shape: tuple[int, ...], channels: int, card: ModelCard, defaults: GenerationSettings, chosen: Mapping[str, Any]
) -> GenerationSettings:
    """The settings of latents of this shape, as far as it determines them; the others as in `make_settings`."""
    if len(shape) != 5 or shape[1] != channels:
        raise InvalidValueError(
            f"latents have shape {shape}, expected (videos, {channels}, frames, height, width): those of another "
            "model; use them with the model they were made with"
        )
    videos, _, frames, height, width = shape
    # First: a wrong choice is not the latents' fault.
    settings = make_settings(defaults, chosen, card.limits)
    sizes = {"num_videos": videos, "height": height * card.spatial_scale, "width": width * card.spatial_scale}
    # Those of the sound are the last ones, as many as the frame rate makes them.
    counts = range(frames, 0, -1) if card.sound is not None else (frames,)
    try:
        for count in counts:
            made: dict[str, Any] = {**sizes, "num_frames": _frames_of_latents(count, card, settings)}
            found = dataclasses.replace(settings, **made)
            if card.latent_size(found)[0] == frames:
                return make_settings(settings, made, card.limits)
    except InvalidValueError as error:
        raise InvalidValueError(f"latents have shape {shape}, which cannot be decoded: {error}") from error
    raise InvalidValueError(
        f"latents have shape {shape}, and no video of {settings.fps} frames per second has as many with its sound; "
        "decode with the frame rate they were made with",
        field="fps",
    )


def _frames_of_latents(count: int, card: ModelCard, settings: GenerationSettings) -> int:
    if not card.makes_segments:
        return (count - 1) * card.temporal_scale + 1
    segment, overlap = (settings.context_frames - 1) // card.temporal_scale + 1, card.segment_overlap(settings)
    if count % segment:
        raise InvalidValueError(
            f"latents have {count} frames, which are no segments of {segment}; decode with the context_frames they "
            "were made with",
            field="context_frames",
        )
    return count // segment * (settings.context_frames - overlap) + overlap


def parse_size(
    text: str, card: ModelCard, defaults: GenerationSettings, chosen: Mapping[str, Any] = {}
) -> GenerationSettings:
    """Settings from "1280x720x81", "1280x720", or a size's name such as "720P"; the others as in `make_settings`."""
    match = re.fullmatch(r"(\d{1,6})[x×](\d{1,6})(?:[x×](\d{1,6}))?", text.strip().lower())
    if match is not None:
        frames = None if match[3] is None else int(match[3])
        values: Mapping[str, Any] = {"width": int(match[1]), "height": int(match[2]), "num_frames": frames}
    elif text.upper() in card.sizes:
        values = card.sizes[text.upper()]
    else:
        names = ", ".join(sorted(card.sizes))
        raise InvalidValueError(
            f"size={text} is no size; write width×height×frames as 1280x720x81, or one of {names}", field="size"
        )
    try:
        return make_settings(defaults, {**values, **chosen}, card.limits)
    except InvalidValueError as error:
        if error.field not in ("height", "width", "num_frames"):
            raise
        raise InvalidValueError(f"size={text}: {error}", field="size") from error


def check_settings(settings: GenerationSettings, limits: Limits) -> None:
    for name in ("height", "width"):
        _check_size(name, getattr(settings, name), limits)
    _check_frames(settings.num_frames, limits)
    _check_count("num_inference_steps", settings.num_inference_steps, limits.steps_max)
    _check_count("num_videos", settings.num_videos, limits.videos_max)
    _check_count("fps", settings.fps, limits.fps_max)
    _check_number("guidance_scale", settings.guidance_scale, 0.0, limits.guidance_max)
    _check_number("guidance_scale_2", settings.guidance_scale_2, 0.0, limits.guidance_max)
    _check_number("boundary", settings.boundary, 0.0, 1.0)
    _check_number("flow_shift", settings.flow_shift, 0.01, limits.shift_max)
    _check_number("reuse", settings.reuse, 0.0, limits.reuse_max)
    _check_number("guidance_until", settings.guidance_until, 0.0, 1.0)
    _check_number("cfg_normalization", settings.cfg_normalization, 0.0, limits.guidance_max)
    for name in ("stg_scale", "modality_scale", "audio_guidance_scale", "audio_stg_scale", "audio_modality_scale"):
        _check_number(name, getattr(settings, name), 0.0, limits.guidance_max)
    for name in ("guidance_rescale", "audio_guidance_rescale"):
        _check_number(name, getattr(settings, name), 0.0, 1.0)
    _check_block(settings.stg_block, limits)
    _check_count("max_sequence_length", settings.max_sequence_length, limits.tokens_max)
    if settings.max_sequence_length % limits.tokens_multiple:
        raise InvalidValueError(
            f"max_sequence_length={settings.max_sequence_length} is not divisible by {limits.tokens_multiple}; use "
            f"{-(-settings.max_sequence_length // limits.tokens_multiple) * limits.tokens_multiple}",
            field="max_sequence_length",
        )
    _check_context(settings, limits)
    check_tile(settings, limits)
    if not isinstance(settings.seed, int) or isinstance(settings.seed, bool) or not 0 <= settings.seed < 2**64:
        raise InvalidValueError(f"seed={settings.seed!r} is not a whole number from 0 to 2^64-1", field="seed")
    if settings.scheduler not in limits.schedulers:
        raise InvalidValueError(
            f"scheduler={settings.scheduler!r} is unknown; choose from {', '.join(limits.schedulers)}",
            field="scheduler",
        )
    _check_sigmas(settings)
    if not isinstance(settings.negative_prompt, str):
        raise InvalidValueError(
            f"negative_prompt is a {type(settings.negative_prompt).__name__}, expected text", field="negative_prompt"
        )


def _check_sigmas(settings: GenerationSettings) -> None:
    if settings.sigmas == "":
        return
    count = len(parse_sigmas(settings.sigmas))
    if count != settings.num_inference_steps:
        raise InvalidValueError(
            f"sigmas={settings.sigmas!r} are {count} steps, and num_inference_steps={settings.num_inference_steps}; "
            "leave one of them out",
            field="sigmas",
        )
    if not settings.scheduler.startswith("euler"):
        raise InvalidValueError(
            f"sigmas={settings.sigmas!r} are for an Euler scheduler, and scheduler={settings.scheduler} has its own; "
            "choose euler",
            field="sigmas",
        )


def _check_context(settings: GenerationSettings, limits: Limits) -> None:
    for name, known in (
        ("context", get_args(Context)),
        ("context_weights", get_args(ContextWeights)),
        ("context_noise", get_args(ContextNoise)),
    ):
        if getattr(settings, name) not in known:
            raise InvalidValueError(
                f"{name}={getattr(settings, name)!r} is unknown; choose from {', '.join(known)}", field=name
            )
    if limits.frames_max == 1:
        _check_no_context(settings)
        return
    if limits.segment_overlaps:
        _check_segments(settings, limits)
    if settings.context_frames != 0:
        _check_window(settings, limits.frames_multiple, limits.frames_max)
    overlap = settings.context_overlap
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < -1:
        raise InvalidValueError(
            f"context_overlap={overlap!r} is not a whole number of frames; give 0 or more", field="context_overlap"
        )
    _check_count("context_stride", settings.context_stride, _STRIDE_MAX)
    if settings.context_stride > 1 and settings.context not in ("uniform", "looped"):
        raise InvalidValueError(
            f"context_stride={settings.context_stride} is for context=uniform or looped, and context is "
            f"{settings.context}; choose one of them, or leave it out",
            field="context_stride",
        )
    if settings.context_noise == "freenoise" and settings.context not in ("auto", *get_args(ContextSchedule)):
        raise InvalidValueError(
            f"context_noise=freenoise is for windows, and context is {settings.context}; choose "
            f"{', '.join(get_args(ContextSchedule))}, or leave it out",
            field="context_noise",
        )
    _check_number("context_keyframes", settings.context_keyframes, 0.0, 1.0)
    if settings.context_keyframes and settings.context not in ("auto", *get_args(ContextSchedule)):
        raise InvalidValueError(
            f"context_keyframes={settings.context_keyframes:g} is for windows, and context is {settings.context}; "
            f"choose {', '.join(get_args(ContextSchedule))}, or leave it out",
            field="context_keyframes",
        )


def _check_window(settings: GenerationSettings, step: int, largest: int) -> None:
    frames, overlap = settings.context_frames, settings.context_overlap
    if not isinstance(frames, int) or isinstance(frames, bool) or not step < frames <= largest:
        raise InvalidValueError(
            f"context_frames={frames!r} is not a whole number from {step + 1} to {largest}", field="context_frames"
        )
    if (frames - 1) % step:
        below = (frames - 1) // step * step + 1
        near = [str(count) for count in (below, below + step) if step < count <= largest]
        raise InvalidValueError(
            f"context_frames={frames} is not {step}n+1; use {' or '.join(near)}", field="context_frames"
        )
    if isinstance(overlap, int) and overlap >= frames:
        raise InvalidValueError(
            f"context_overlap={overlap} leaves windows of {frames} frames (context_frames) no way on; give "
            f"{frames - 1} at most",
            field="context_overlap",
        )


def _check_no_context(settings: GenerationSettings) -> None:
    """Raises InvalidValueError where context windows are asked of a model that makes images."""
    for field in dataclasses.fields(GenerationSettings):
        name, value = field.name, getattr(settings, field.name)
        allowed = ("auto", "none") if name == "context" else (field.default,)
        if name.startswith("context") and value not in allowed:
            raise InvalidValueError(
                f"{name}={value!r} is for long videos and this model makes images; leave it out", field=name
            )


_STRIDE_MAX = 16
"""Windows of every 2 ** 15th frame: more than any video has."""


def check_prompt(prompt: str) -> None:
    if not isinstance(prompt, str):
        raise InvalidValueError(f"prompt is a {type(prompt).__name__}, expected text", field="prompt")
    if not prompt.strip():
        raise InvalidValueError(f"prompt={prompt!r} is empty; say what the video should show", field="prompt")


def check_checkpoint_every(every: object) -> None:
    """Raises InvalidValueError for what is no number of steps between two saves."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidValueError(
            f"checkpoint_every={every} is not a number of steps; give a whole number from 1", field="checkpoint_every"
        )


def check_images(model: str, wanted: ImageInput | None, count: int, settings: GenerationSettings) -> None:
    """Raises InvalidValueError unless the model takes `count` images as frames or references."""
    if wanted is not None and wanted.role == "initial":
        if count > 1:
            raise InvalidValueError(
                f"image is given {count} times, but model {model} starts from one image; leave the others out",
                field="image",
            )
        return
    if wanted is None:
        if count:
            raise InvalidValueError(
                f"image is given, but model {model} begins with a prompt alone; leave it out, or choose a model that "
                f"begins with an image, such as {DEMO_IMAGE_MODEL}",
                field="image",
            )
        return
    if wanted.required and not count:
        raise InvalidValueError(f"image is missing: model {model} begins with an image; give one", field="image")
    if wanted.role == "reference":
        if count > wanted.max_images:
            raise InvalidValueError(
                f"image is given {count} times, but model {model} takes {wanted.max_images} at most; leave the others "
                "out",
                field="image",
            )
        return
    if count > wanted.max_frames:
        takes = "a first and a last image" if wanted.max_frames == 2 else "a first image only"
        raise InvalidValueError(
            f"image is given {count} times, but model {model} takes {takes}; leave the others out", field="image"
        )
    if wanted.last_image == "required" and count == 1:
        raise InvalidValueError(
            f"last_image is missing: model {model} takes a first and a last image; give both", field="last_image"
        )
    if count == 2 and settings.num_frames == 1:
        raise InvalidValueError("num_frames=1 has no last frame; give more frames, or one image", field="num_frames")


def _check_size(name: str, value: int, limits: Limits) -> None:
    step = limits.size_multiple
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValueError(f"{name}={value!r} is not a whole number", field=name)
    if not limits.size_min <= value <= limits.size_max:
        raise InvalidValueError(f"{name}={value} is outside {limits.size_min} to {limits.size_max}", field=name)
    if value % step:
        below, above = value // step * step, -(-value // step) * step
        near = [str(size) for size in (below, above) if limits.size_min <= size <= limits.size_max]
        raise InvalidValueError(f"{name}={value} is not divisible by {step}; use {' or '.join(near)}", field=name)


def _check_frames(value: int, limits: Limits) -> None:
    step = limits.frames_multiple
    if limits.frames_max == 1 and value != 1:
        raise InvalidValueError(
            f"num_frames={value!r} is for videos and this model makes images; use 1", field="num_frames"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limits.frames_max:
        raise InvalidValueError(
            f"num_frames={value!r} is not a whole number from 1 to {limits.frames_max}", field="num_frames"
        )
    if (value - 1) % step:
        below = (value - 1) // step * step + 1
        near = [str(count) for count in (below, below + step) if count <= limits.frames_max]
        raise InvalidValueError(f"num_frames={value} is not {step}n+1; use {' or '.join(near)}", field="num_frames")


def _check_segments(settings: GenerationSettings, limits: Limits) -> None:
    """Of a model that makes all videos segment by segment."""
    frames, overlap, step = settings.context_frames, settings.context_overlap, limits.segment_multiple
    if settings.context not in ("auto", "continue", "none"):
        raise InvalidValueError(
            f"context={settings.context} is windows, and this model makes a video segment by segment; choose continue, "
            "or leave it out",
            field="context",
        )
    if overlap not in (-1, *limits.segment_overlaps):
        choices = " or ".join(map(str, limits.segment_overlaps))
        raise InvalidValueError(
            f"context_overlap={overlap} is no number of frames that two segments of this model share; choose {choices}",
            field="context_overlap",
        )
    if isinstance(frames, int) and frames and ((frames - 1) % step or frames <= overlap):
        below = max((frames - 1) // step * step + 1, overlap + step)
        raise InvalidValueError(
            f"context_frames={frames} is not {step}n+1 and over context_overlap={overlap}; use {below} or "
            f"{below + step}",
            field="context_frames",
        )


def _check_block(value: int, limits: Limits) -> None:
    largest = max(limits.blocks - 1, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise InvalidValueError(
            f"stg_block={value!r} is not allowed; give a whole number from 0 to {largest}", field="stg_block"
        )


def _check_count(name: str, value: int, largest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise InvalidValueError(f"{name}={value!r} is not allowed; give a whole number from 1 to {largest}", field=name)


def _check_number(name: str, value: float, smallest: float, largest: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not smallest <= value <= largest:
        raise InvalidValueError(f"{name}={value!r} is not a number from {smallest:g} to {largest:g}", field=name)
