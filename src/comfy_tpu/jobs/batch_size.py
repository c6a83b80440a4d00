"""How many prompts share a step: as many as keep the devices busy, and as there is memory for."""

from __future__ import annotations

import dataclasses
import math

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError
from comfy_tpu.jobs.worker_thread import ROWS_MAX
from comfy_tpu.parallel.chips import find_slice, parse_slice
from comfy_tpu.parallel.layouts import estimate, fits
from comfy_tpu.pipeline.step import batch_rows
from comfy_tpu.pipeline.video import VideoPipeline

BUSY_TOKENS = 8192
"""Tokens per device with which matrix products are as fast as they get. A second video in the same step then only makes
the step longer."""


_GPU_SHARE = 0.8


def choose_rows(pipeline: VideoPipeline, settings: GenerationSettings) -> int:
    """A power of two: few different programs are compiled."""
    rows = 1
    while rows < ROWS_MAX and _pays(pipeline, settings, rows) and _has_room(pipeline, settings, 2 * rows):
        rows *= 2
    return rows


def _pays(pipeline: VideoPipeline, settings: GenerationSettings, rows: int) -> bool:
    """By about as many tokens as there are patches of 2×2 latents, which most models have."""
    tokens = math.prod(pipeline.family.card.latent_size(settings)) / 4
    batch = batch_rows(pipeline.family, dataclasses.replace(settings, num_videos=rows))
    return batch * tokens / pipeline.placement.sizes.device_count < BUSY_TOKENS


def _has_room(pipeline: VideoPipeline, settings: GenerationSettings, rows: int) -> bool:
    """By the estimate of `comfy-tpu plan`; on another chip than a TPU, by that of a TPU in the memory that it has."""
    wanted = dataclasses.replace(settings, num_videos=rows)
    placement = pipeline.choose_placement(wanted)
    if placement.platform == "cpu":
        return True
    try:
        work = pipeline.files.workload(wanted)
    except CheckpointError:  # a model of a make that the estimate does not know
        return False
    slice_ = find_slice(placement.chip, placement.sizes.device_count)
    if slice_ is not None:
        return fits(estimate(work, placement.sizes, slice_).memory.total, slice_.chip)
    needed = estimate(work, placement.sizes, parse_slice("v6e-1")).memory.total
    device = placement.mesh.devices.flat[0]
    return bool(needed <= _GPU_SHARE * (device.memory_stats() or {}).get("bytes_limit", 0))
