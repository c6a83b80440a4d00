"""Qwen-Image's schedules: the flow shift grows with the number of tokens, and the last step starts at 0.02."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import SCHEDULER_FILE, Config
from comfy_tpu.families.model_family import ReadJson, SchedulerFactory
from comfy_tpu.families.shared.schedulers import token_shift_schedulers

_SCHEDULER: Config = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
"""As published; a model directory brings its own."""


def image_tokens(settings: GenerationSettings) -> int:
    return (settings.height // 16) * (settings.width // 16)


SCHEDULERS = token_shift_schedulers(_SCHEDULER, image_tokens)


def own_schedulers(read: ReadJson) -> Mapping[str, SchedulerFactory]:
    own = read(SCHEDULER_FILE)
    return token_shift_schedulers(own, image_tokens) if own else {}
