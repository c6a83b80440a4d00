"""Flux.1's schedules: the flow shift of dev grows with the number of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.model_family import SchedulerFactory
from comfy_tpu.families.shared.schedulers import chosen_sigmas, dpm, token_shift, unipc


def image_tokens(settings: GenerationSettings) -> int:
    return (settings.height // 16) * (settings.width // 16)


def dynamic_shift(settings: GenerationSettings) -> float:
    """The flow shift that Flux.1 dev was trained for at a size: more for more tokens. flow_shift is a factor on it."""
    return settings.flow_shift * token_shift({"use_dynamic_shifting": True}, image_tokens(settings))


def euler(settings: GenerationSettings) -> Any:
    """Euler steps from sigma 1 to 1/steps, as in diffusers' Flux pipeline, and not to the last sigma of training."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    steps = settings.num_inference_steps
    scheduler = FlowMatchEulerDiscreteScheduler(shift=settings.flow_shift)
    scheduler.set_timesteps(sigmas=chosen_sigmas(settings, np.linspace(1.0, 1 / steps, steps)))
    return scheduler


def _with_dynamic_shift(factory: SchedulerFactory) -> SchedulerFactory:
    return lambda settings: factory(dataclasses.replace(settings, flow_shift=dynamic_shift(settings)))


SCHNELL_SCHEDULERS: dict[str, SchedulerFactory] = {"euler": euler, "unipc": unipc, "dpm++": dpm}
DEV_SCHEDULERS = {name: _with_dynamic_shift(factory) for name, factory in SCHNELL_SCHEDULERS.items()}
