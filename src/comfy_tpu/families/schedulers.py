"""diffusers' schedulers for flow models, with their timesteps set."""

from __future__ import annotations

from typing import Any

import numpy as np

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.family import SchedulerFactory


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


def _set(scheduler: Any, settings: GenerationSettings) -> Any:
    scheduler.set_timesteps(settings.num_inference_steps)
    return scheduler


FLOW_SCHEDULERS: dict[str, SchedulerFactory] = {"unipc": unipc, "euler": euler, "dpm++": dpm}
"""By the name a user gives."""
