"""The schedules of Lightricks' models: the flow shift grows with the number of tokens of the video."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import SCHEDULER_FILE, Config
from comfy_tpu.families.model_family import ReadJson, SchedulerFactory
from comfy_tpu.families.shared.all_frames_vae import SPATIAL_SCALE, TEMPORAL_SCALE
from comfy_tpu.families.shared.schedulers import token_shift_schedulers


def token_count(settings: GenerationSettings) -> int:
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    return frames * (settings.height // SPATIAL_SCALE) * (settings.width // SPATIAL_SCALE)


_SCHEDULER: Config = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
"""As published; a model directory brings its own."""

SCHEDULERS = token_shift_schedulers(_SCHEDULER, token_count)


def own_schedulers(read: ReadJson) -> Mapping[str, SchedulerFactory]:
    own = read(SCHEDULER_FILE)
    return token_shift_schedulers(own, token_count) if own else {}
