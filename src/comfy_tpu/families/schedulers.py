"""diffusers' schedulers for flow models, with their timesteps set."""

from __future__ import annotations

from typing import Any

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
