"""diffusers' schedulers for flow models, with their timesteps set."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, UnsupportedError
from comfy_tpu.families.card import SCHEDULER_FILE, Config
from comfy_tpu.families.model_family import SchedulerFactory
from comfy_tpu.families.settings import parse_sigmas


def unipc(settings: GenerationSettings) -> Any:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.flow_shift
    )
    return _set_timesteps(scheduler, settings)


def euler(settings: GenerationSettings) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=settings.flow_shift)
    if settings.sigmas:
        scheduler.set_timesteps(sigmas=np.array(parse_sigmas(settings.sigmas)))
        return scheduler
    return _set_timesteps(scheduler, settings)


def euler_from_one(settings: GenerationSettings) -> Any:
    """Euler with sigmas in equal steps from 1, as in pipelines that pass their own sigmas, and as "trailing" timesteps
    are. `euler` above has the scheduler's sigmas, which end just above zero: 4 steps at shift 5 begin at 1, 0.91, 0.72
    and 0.02, where these begin at 1, 0.94, 0.83 and 0.63, which distilled models are trained on."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=settings.flow_shift)
    scheduler.set_timesteps(
        sigmas=chosen_sigmas(settings, np.linspace(1.0, 0.0, settings.num_inference_steps + 1)[:-1])
    )
    return scheduler


def chosen_sigmas(settings: GenerationSettings, otherwise: np.ndarray) -> np.ndarray:
    """The noise levels that the user gave, before the shift; else the scheduler's."""
    return np.array(parse_sigmas(settings.sigmas)) if settings.sigmas else otherwise


def dpm(settings: GenerationSettings) -> Any:
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=settings.flow_shift,
        algorithm_type="dpmsolver++",
    )
    return _set_timesteps(scheduler, settings)


def own_shift(read: Callable[[str], Config]) -> dict[str, float]:
    """The flow shift of the model directory's scheduler; diffusers has two names for it."""
    config = read(SCHEDULER_FILE)
    name = "flow_shift" if "flow_shift" in config else "shift"
    if name not in config:
        return {}
    shift = config[name]
    if not isinstance(shift, (int, float)) or isinstance(shift, bool):
        raise CheckpointError(f"{SCHEDULER_FILE} has {name}={shift!r}, expected a number; download the model again")
    return {"flow_shift": float(shift)}


def token_shift(config: Config, tokens: int) -> float:
    """The flow shift that a FlowMatchEulerDiscreteScheduler of this configuration has for a number of tokens.

    diffusers' exponential time shift by mu is a flow shift of e^mu, and its linear one of mu.
    """
    if not config.get("use_dynamic_shifting"):
        return float(config.get("shift", 1.0))
    few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    mu = float(least + (most - least) / (many - few) * (tokens - few))
    return mu if config.get("time_shift_type") == "linear" else math.exp(mu)


def token_shift_schedulers(config: Config, tokens: Callable[[GenerationSettings], int]) -> dict[str, SchedulerFactory]:
    """The schedulers of a model's scheduler_config.json: its own Euler steps, from sigma 1 to 1/steps before the shift,
    and other solvers with that shift alone. flow_shift is a factor on the shift."""
    if config.get("_class_name", _EULER) != _EULER:
        raise UnsupportedError(
            f"{SCHEDULER_FILE} describes a {config['_class_name']}, expected a {_EULER}; use the model's own file"
        )

    def shifted(settings: GenerationSettings) -> GenerationSettings:
        shift = settings.flow_shift * token_shift(config, tokens(settings))
        return dataclasses.replace(settings, flow_shift=shift)

    def own_euler(settings: GenerationSettings) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        known = {name: value for name, value in config.items() if not name.startswith("_")}
        scheduler = FlowMatchEulerDiscreteScheduler(**known | {"use_dynamic_shifting": False, "shift": 1.0})
        scheduler.set_shift(shifted(settings).flow_shift)
        steps = settings.num_inference_steps
        scheduler.set_timesteps(sigmas=chosen_sigmas(settings, np.linspace(1.0, 1 / steps, steps)))
        return scheduler

    return {
        "euler": own_euler,
        "unipc": lambda settings: unipc(shifted(settings)),
        "dpm++": lambda settings: dpm(shifted(settings)),
    }


_EULER = "FlowMatchEulerDiscreteScheduler"


def _set_timesteps(scheduler: Any, settings: GenerationSettings) -> Any:
    scheduler.set_timesteps(settings.num_inference_steps)
    return scheduler


FLOW_SCHEDULERS: dict[str, SchedulerFactory] = {
    "unipc": unipc,
    "euler": euler,
    "dpm++": dpm,
    "euler-trailing": euler_from_one,
}
"""Schedulers by the names that users choose from."""
