"""Z-Image's schedules: a fixed flow shift, or that of the model directory's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import SCHEDULER_FILE
from comfy_tpu.families.model_family import ReadJson, SchedulerFactory
from comfy_tpu.families.shared.schedulers import (
    dpm,
    euler_from_one,
    own_shift,
    token_shift_schedulers,
    unipc,
)

SCHEDULERS: dict[str, SchedulerFactory] = {"euler": euler_from_one, "unipc": unipc, "dpm++": dpm}


def image_tokens(settings: GenerationSettings) -> int:
    return (settings.height // 16) * (settings.width // 16)


def own_schedulers(read: ReadJson) -> Mapping[str, SchedulerFactory]:
    """Those of a model whose shift grows with the number of tokens. None was published; diffusers' pipeline has it."""
    own = read(SCHEDULER_FILE)
    return token_shift_schedulers(own, image_tokens) if own.get("use_dynamic_shifting") else {}


def own_settings(read: ReadJson) -> dict[str, Any]:
    """The scheduler's shift; 1, a factor, where it grows with the number of tokens."""
    return {"flow_shift": 1.0} if own_schedulers(read) else own_shift(read)
