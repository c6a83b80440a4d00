"""Flux.2's schedules: the flow shift grows with the number of tokens, and changes with that of steps."""

from __future__ import annotations

import dataclasses
import math

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.model_family import SchedulerFactory
from comfy_tpu.families.shared.schedulers import dpm, euler_from_one, unipc


def image_tokens(settings: GenerationSettings) -> int:
    return (settings.height // 16) * (settings.width // 16)


def dynamic_shift(settings: GenerationSettings) -> float:
    """e to the "empirical mu" of diffusers' pipelines: by the number of tokens and, up to 4300 of them, of steps.

    flow_shift is a factor on it.
    """
    tokens = image_tokens(settings)
    at_200_steps = 0.00016927 * tokens + 0.45666666
    mu = at_200_steps
    if tokens <= 4300:
        at_10_steps = 8.73809524e-05 * tokens + 1.89833333
        mu += (at_200_steps - at_10_steps) / 190 * (settings.num_inference_steps - 200)
    return settings.flow_shift * math.exp(mu)


def _with_dynamic_shift(factory: SchedulerFactory) -> SchedulerFactory:
    return lambda settings: factory(dataclasses.replace(settings, flow_shift=dynamic_shift(settings)))


SCHEDULERS: dict[str, SchedulerFactory] = {
    name: _with_dynamic_shift(factory)
    for name, factory in (("euler", euler_from_one), ("unipc", unipc), ("dpm++", dpm))
}
