"""diffusers' schedulers for flow models, with their timesteps set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.family import Config, SchedulerFactory

_SCHEDULER_FILE = "scheduler/scheduler_config.json"


def unipc(settings: GenerationSettings) -> Any:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.flow_shift
    )
    return _set(scheduler, settings)


def euler(settings: GenerationSettings) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return _set(FlowMatchEulerDiscreteScheduler(shift=settings.flow_shift), settings)


def euler_from_one(settings: GenerationSettings) -> Any:
    """With noise levels in equal steps from 1, as pipelines have them that say so themselves; `euler` above has the
    scheduler's own, which end above zero before the shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=settings.flow_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, settings.num_inference_steps + 1)[:-1])
    return scheduler


def dpm(settings: GenerationSettings) -> Any:
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=settings.flow_shift,
        algorithm_type="dpmsolver++",
    )
    return _set(scheduler, settings)


def own_shift(read: Callable[[str], Config]) -> dict[str, float]:
    """The flow shift of the scheduler that a model directory brings along; diffusers has two names for it."""
    config = read(_SCHEDULER_FILE)
    name = "flow_shift" if "flow_shift" in config else "shift"
    if name not in config:
        return {}
    shift = config[name]
    if not isinstance(shift, (int, float)) or isinstance(shift, bool):
        raise CheckpointError(f"{_SCHEDULER_FILE} has {name}={shift!r}, expected a number; download the model again")
    return {"flow_shift": float(shift)}


def _set(scheduler: Any, settings: GenerationSettings) -> Any:
    scheduler.set_timesteps(settings.num_inference_steps)
    return scheduler


FLOW_SCHEDULERS: dict[str, SchedulerFactory] = {"unipc": unipc, "euler": euler, "dpm++": dpm}
"""By the name a user gives."""
