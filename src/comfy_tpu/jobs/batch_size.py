"""How many prompts share a step, and whether two such groups run at once: as many as keep the devices busy, and as
there is memory for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError
from comfy_tpu.jobs.worker_thread import ROWS_MAX
from comfy_tpu.parallel import hosts
from comfy_tpu.parallel.chips import find_slice, parse_slice
from comfy_tpu.parallel.layouts import estimate, usable_bytes
from comfy_tpu.pipeline.step import BUSY_TOKENS, count_tokens, keeps_busy
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.windows import windows_per_call

_GPU_SHARE = 0.8


def choose_rows(pipeline: VideoPipeline, settings: GenerationSettings) -> int:
    return double_rows(lambda rows: _pays(pipeline, settings, rows), lambda rows: _has_room(pipeline, settings, rows))


def double_rows(pays: Callable[[int], bool], has_room: Callable[[int], bool] = lambda rows: True) -> int:
    """A power of two: few different programs are compiled. `pays`: whether more than so many rows do."""
    rows = 1
    while rows < ROWS_MAX and pays(rows) and has_room(2 * rows):
        rows *= 2
    return rows


def _pays(pipeline: VideoPipeline, settings: GenerationSettings, rows: int) -> bool:
    return not keeps_busy(pipeline.family, dataclasses.replace(settings, num_videos=rows), pipeline.placement)


def runs_beside(pipeline: VideoPipeline, settings: GenerationSettings) -> bool:
    """Whether two groups of these settings run at once: small ones, whose programs leave cores idle.

    Not on accelerators, which carry programs out one after the other anyway, and have the memory for one. Not on
    several CPU devices: the collectives of two programs at once would wait for each other.
    """
    placement = pipeline.choose_placement(settings)
    is_one = placement.platform == "cpu" and placement.sizes.device_count == 1 and not hosts.host_names()
    return is_one and (os.cpu_count() or 1) > 1 and count_tokens(pipeline.family, settings) < BUSY_TOKENS


def _has_room(pipeline: VideoPipeline, settings: GenerationSettings, rows: int) -> bool:
    try:
        memory = estimate_memory(pipeline, dataclasses.replace(settings, num_videos=rows))
    except CheckpointError:  # a model of a make that the estimate does not know
        return False
    return memory is None or memory.fits


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a device."""

    needed: int
    """By a step, with the weights."""
    available: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def estimate_memory(pipeline: VideoPipeline, settings: GenerationSettings) -> StepMemory | None:
    """By the estimate of `comfy-tpu plan`; on another chip than a TPU, by that of a TPU in the memory that it has. None
    on a CPU. Raises CheckpointError for a model of a make that the estimate does not know."""
    placement = pipeline.choose_placement(settings)
    if placement.platform == "cpu":
        return None
    windows = windows_per_call(pipeline.family, settings, placement)
    work = pipeline.files.workload(settings, windows=windows)
    slice_ = find_slice(placement.chip, placement.sizes.device_count)
    if slice_ is not None:
        needed = estimate(work, placement.sizes, slice_).memory.total
        return StepMemory(needed, usable_bytes(slice_.chip))
    needed = estimate(work, placement.sizes, parse_slice("v6e-1")).memory.total
    device = placement.mesh.devices.flat[0]
    return StepMemory(needed, int(_GPU_SHARE * (device.memory_stats() or {}).get("bytes_limit", 0)))
