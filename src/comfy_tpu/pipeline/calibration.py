"""Measures a model's reuse curve: how much the velocity differs from step to step, over a few prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.context import without_windows
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.pipeline.reuse import Curve, save_curve
from comfy_tpu.pipeline.video import VideoPipeline

PROMPTS = (
    "a cat walks through tall grass towards the camera, close-up, soft evening light",
    "waves break on a rocky coast under a cloudy sky, seen from above",
    "a crowded street at night in the rain, neon signs reflected in the puddles, people with umbrellas",
)
"""Prompts for models of real scenes: with little and much motion, few and many details."""

_SAVED_SETTINGS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "flow_shift",
    "seed",
    "scheduler",
)


def measure_curve(
    pipeline: VideoPipeline,
    prompts: Sequence[str],
    settings: GenerationSettings,
    given: GivenMedia | Sequence[Image.Image] = NO_MEDIA,
) -> Curve:
    """The mean curve over the prompts, each with its own seed. `given`: as for `VideoPipeline.encode`."""
    if settings.num_inference_steps < 2:
        raise InvalidValueError(
            f"num_inference_steps={settings.num_inference_steps} leaves nothing to compare; give 2 or more, better 50",
            field="num_inference_steps",
        )
    settings = without_windows(dataclasses.replace(settings, reuse=0.0, guidance_until=1.0))
    measured = []
    for number, prompt in enumerate(prompts):
        own = dataclasses.replace(settings, seed=settings.seed + number)
        measured.append(compare_velocities(pipeline.velocities(pipeline.encode(prompt, own, given), own)))
        if not np.isfinite(measured[-1]).all():
            raise InvalidValueError(
                f"model {pipeline.model_name} answers prompt {prompt!r} with NaN, infinity or nothing but zeros, which "
                "cannot be compared; try dtype float32",
                field="model",
            )
    ratios, changes = np.mean(measured, axis=0)
    sigmas = np.array([step.sigma for step in pipeline.plan(settings)], np.float64)
    return Curve(sigmas, ratios, changes)


def save_measured_curve(
    path: Path,
    curve: Curve,
    pipeline: VideoPipeline,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    images_fingerprint: str = "",
) -> None:
    """Writes the curve with the settings, prompts and `images_fingerprint` that it was measured with."""
    made_with = {name: getattr(settings, name) for name in _SAVED_SETTINGS} | {"prompts": list(prompts)}
    made_with |= {"pictures": images_fingerprint} if images_fingerprint else {}
    family, fingerprint = pipeline.family.name, pipeline.model_fingerprint
    save_curve(path, curve, family=family, fingerprint=fingerprint, made_with=made_with)


def compare_velocities(velocities: Iterable[torch.Tensor]) -> tuple[list[float], list[float]]:
    """For each velocity against the one before it: the ratio of magnitudes, and the difference left after scaling."""
    ratios, changes = [1.0], [0.0]
    before: torch.Tensor | None = None
    for velocity in velocities:
        if before is not None:
            ratios.append((velocity.norm() / before.norm()).item())
            changes.append(((velocity - ratios[-1] * before).norm() / velocity.norm()).item())
        before = velocity
    return ratios, changes
