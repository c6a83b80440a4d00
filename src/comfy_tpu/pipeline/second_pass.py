"""A second pass at a larger size: upscaled latents, noise added to them, and the last steps again ("hires fix").

The upscaled latents are embeddings like those of a video to start from (`initial.py`), so that a second pass is a
denoising like any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings, SecondPass, UpscaleBy
from comfy_tpu.errors import InvalidValueError, rename_field
from comfy_tpu.families.card import Limits, ModelCard
from comfy_tpu.families.context import choose_method, needs_first_frame
from comfy_tpu.families.settings import check_settings
from comfy_tpu.pipeline.checks import check_context, check_tiled_media
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.pipeline.images import as_bytes
from comfy_tpu.pipeline.initial import INITIAL, check_strength, initial_embeddings, without_initial
from comfy_tpu.pipeline.latent_resizing import keep_sound, resize_latents
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.video import VideoPipeline

SCALE_MAX = 8


def check_second_pass(
    card: ModelCard, model: str, first: GenerationSettings, second: SecondPass, given: GivenMedia = NO_MEDIA
) -> GenerationSettings:
    """The settings of the second pass; raises InvalidValueError for what the model cannot do, with the user's field.
    `given`: its media."""
    larger = upscaled_settings(card, model, first, second.scale, second.by)
    if choose_method(card, first, begins_with_image=needs_first_frame(card)) == "continue":
        raise InvalidValueError(
            f"upscale={second.scale:g} is a second pass over a whole video, and one of {first.num_frames} frames is "
            f"continued every {first.context_frames}; ask for {first.context_frames} frames at most, or leave it out",
            field="upscale",
        )
    steps = first.num_inference_steps if second.steps == 0 else second.steps
    changes: dict[str, Any] = {"num_inference_steps": steps}
    if steps != first.num_inference_steps:
        changes["sigmas"] = ""  # those of a fixed number of steps
    larger = dataclasses.replace(larger, **changes)
    try:
        check_settings(larger, card.limits)
        check_context(card, model, larger)
        check_tiled_media(card, model, larger, given)
        check_strength(card, second.strength, larger)
    except InvalidValueError as error:
        field = {"strength": "upscale_strength", "num_inference_steps": "upscale_steps"}.get(
            error.field or "", error.field
        )
        raise InvalidValueError(rename_field(str(error), error.field, field), field=field) from error
    return larger


def upscaled_settings(
    card: ModelCard, model: str, first: GenerationSettings, scale: float, by: str
) -> GenerationSettings:
    """The settings of a result that is `scale` times as large, in the sizes that the model takes."""
    if card.makes_segments:
        raise InvalidValueError(
            f"upscale={scale} is a second pass over a whole video, and {model} makes videos segment by segment; leave "
            "it out, or use another model",
            field="upscale",
        )
    if by not in get_args(UpscaleBy):
        raise InvalidValueError(
            f"upscale_by={by!r} is unknown; choose from {', '.join(get_args(UpscaleBy))}", field="upscale_by"
        )
    if by == "pixels" and not card.encodes_results:
        raise InvalidValueError(
            f"upscale_by=pixels encodes the whole result, which {model} does not do here; choose latent",
            field="upscale_by",
        )
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 1 < scale <= SCALE_MAX:
        raise InvalidValueError(
            f"upscale={scale!r} is not a number over 1, up to {SCALE_MAX}; 2 doubles both sides", field="upscale"
        )
    height, width = (_scale_side(side, scale, card.limits) for side in (first.height, first.width))
    larger = dataclasses.replace(first, height=height, width=width)
    if (height, width) == (first.height, first.width):
        step = card.limits.size_multiple
        raise InvalidValueError(
            f"upscale={scale:g} of {width}×{height} is {width}×{height} again, because sides are multiples of {step}; "
            f"use a larger factor, such as {1 + step / max(height, width):.4g}",
            field="upscale",
        )
    try:
        check_settings(larger, card.limits)
    except InvalidValueError as error:
        raise InvalidValueError(
            f"upscale={scale:g} of {first.width}×{first.height} is {larger.width}×{larger.height}: {error}",
            field="upscale",
        ) from error
    return larger


def _scale_side(side: int, scale: float, limits: Limits) -> int:
    return max(round(side * scale / limits.size_multiple), 1) * limits.size_multiple


def upscale_latents(
    pipeline: VideoPipeline, latents: torch.Tensor, first: GenerationSettings, larger: GenerationSettings, by: str
) -> torch.Tensor:
    """Latents [videos, channels, frames, height, width] of the larger size, in the transformer's scale."""
    card = pipeline.family.card
    if by != "pixels":
        return resize_latents(card, latents, first, larger, by)
    # As bytes, part by part: 81 frames of 832×480 are 97 MB, and 388 MB as floats, of both twice while they are joined.
    frames = np.concatenate([as_bytes(part) for part in pipeline.decode(latents, first)], axis=1)
    return keep_sound(card, torch.cat([_encode(pipeline, video, larger) for video in frames]), latents, first)


def _encode(pipeline: VideoPipeline, frames: npt.NDArray[np.uint8], larger: GenerationSettings) -> torch.Tensor:
    """The latents of one video's frames [frames, height, width, 3], resized."""
    single = dataclasses.replace(larger, num_videos=1)
    if not pipeline.family.card.starts_from_image:
        return pipeline.encode_frames(frames, single)
    image = Image.fromarray(frames[0]).resize((larger.width, larger.height), Image.Resampling.LANCZOS)
    return pipeline.encode_media(GivenMedia((image,), strength=1.0), single)[INITIAL]


def encode_again(
    pipeline: VideoPipeline, embeddings: PromptEmbeddings, given: GivenMedia, larger: GenerationSettings
) -> PromptEmbeddings:
    """The embeddings for the larger size: those of the prompt stay, and given media are encoded for it."""
    if not without_initial(embeddings.shared):  # an image or video to start from is of no use any more
        return embeddings
    return dataclasses.replace(embeddings, shared=pipeline.encode_media(given, larger))


def start_from(embeddings: PromptEmbeddings, latents: torch.Tensor, strength: float) -> PromptEmbeddings:
    """Embeddings with which denoising starts from latents, [1 or videos, …] in the transformer's scale."""
    shared = {**without_initial(embeddings.shared), **initial_embeddings(latents, strength)}
    return dataclasses.replace(embeddings, shared=shared)


def denoise_again(
    pipeline: VideoPipeline,
    embeddings: PromptEmbeddings,
    latents: torch.Tensor,
    first: GenerationSettings,
    second: SecondPass,
    given: GivenMedia = NO_MEDIA,
    checkpoint: StepCheckpoint | None = None,
) -> tuple[torch.Tensor, GenerationSettings]:
    """The latents of the second pass, and their settings. `latents`: those of the first pass, and `given`: its media.
    `checkpoint`: as in `VideoPipeline.denoise`, of this pass alone."""
    larger = check_second_pass(pipeline.family.card, pipeline.model_name, first, second, given)
    upscaled = upscale_latents(pipeline, latents, first, larger, second.by)
    begun = start_from(encode_again(pipeline, embeddings, given, larger), upscaled, second.strength)
    return pipeline.denoise(begun, larger, checkpoint=checkpoint), larger


def describe_second_pass(first: GenerationSettings, second: SecondPass) -> str:
    """JSON for the metadata of results."""
    size = f"{first.width}x{first.height}"
    return json.dumps({**dataclasses.asdict(second), "from": size, "from_steps": first.num_inference_steps})


def describe_start(latents: torch.Tensor, strength: float) -> str:
    """The same of a denoising from latents of a file."""
    return json.dumps({"latents": _digest(latents), "strength": strength})


def describe_upscaling(latents: torch.Tensor, scale: float, by: str) -> str:
    """The same of latents that were made larger, and not denoised yet."""
    return json.dumps({"upscaled": scale, "by": by, "from": _digest(latents)})


def _digest(latents: torch.Tensor) -> str:
    return hashlib.sha256(latents.float().contiguous().numpy().tobytes()).hexdigest()[:16]


def read_second_pass(values: Mapping[str, Any]) -> SecondPass | None:
    """The second pass that is chosen; None: none is. Raises InvalidValueError for values without one."""
    chosen: dict[str, Any] = {name: values.get(f"upscale_{name}") for name in ("strength", "steps", "by")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if values.get("upscale") is None:
        if chosen:
            name = next(iter(chosen))
            raise InvalidValueError(
                f"upscale_{name} is for a second pass; give upscale too, or leave it out", field=f"upscale_{name}"
            )
        return None
    return SecondPass(values["upscale"], **chosen)
