"""What a step of a request costs on the workers' devices, by the counts of `comfy-tpu plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from comfy_tpu.config import GenerationSettings, MeshSizes
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.serving.shapes import shape_of

if TYPE_CHECKING:
    from comfy_tpu.parallel.chips import Slice
    from comfy_tpu.parallel.workload import Workload
    from comfy_tpu.pipeline.model_files import ModelFiles
    from comfy_tpu.pipeline.video import VideoPipeline


_SHAPES_MAX = 1000
"""Shapes whose counts are remembered: clients choose them, and any number of them."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    flops: float
    """Of all devices."""
    needed_bytes: int = 0
    """Memory of a device that the step and the weights take; 0: unknown."""
    available_bytes: int = 0
    seconds: float | None = None
    """By `plan`; None where it knows nothing of the chip."""
    rows: int | None = None
    """Jobs that share a step; None: unknown."""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


class Planner(Protocol):
    def cost(self, model: str, settings: GenerationSettings) -> StepCost | None:
        """None where it cannot be counted."""
        ...


class _Counter:
    """Counts each shape once: the first time takes a trace. May be called from any thread."""

    def __init__(self, count: Callable[[str, GenerationSettings], StepCost]) -> None:
        self._count = count
        self._known: dict[tuple[object, ...], StepCost | None] = {}
        self._locks: dict[tuple[object, ...], threading.Lock] = {}
        """By shape: whoever asks for one that is known does not wait for another's trace."""

    def cost(self, model: str, settings: GenerationSettings) -> StepCost | None:
        key = shape_of(model, settings)
        with contextlib.suppress(KeyError):
            return self._known[key]
        with self._locks.setdefault(key, threading.Lock()):
            if key in self._known:
                return self._known[key]
            cost = self._known[key] = self._try_count(model, settings)
            self._locks.pop(key, None)
            for old in list(self._known)[:-_SHAPES_MAX]:
                self._known.pop(old, None)
            return cost

    def _try_count(self, model: str, settings: GenerationSettings) -> StepCost | None:
        try:
            return self._count(model, settings)
        except ComfyTpuError:  # a make that the counts do not know, or no devices: the jobs will say which
            return None


class DevicePlanner(_Counter):
    """Of the devices of this process."""

    def __init__(self, common: Mapping[str, Any]) -> None:
        """`common`: fields of every request, such as mesh and dtype."""
        self._common = common
        super().__init__(self._count_here)

    @functools.cache  # noqa: B019 - as long as the server lives
    def _open(self, model: str) -> VideoPipeline:
        from comfy_tpu.jobs.opening import make_runtime
        from comfy_tpu.pipeline.video import VideoPipeline

        return VideoPipeline.open(model, make_runtime({**self._common, "model": model}))

    def _count_here(self, model: str, settings: GenerationSettings) -> StepCost:
        from comfy_tpu.jobs.batch_size import choose_rows, estimate_memory
        from comfy_tpu.parallel.chips import find_slice
        from comfy_tpu.pipeline.windows import windows_per_call

        pipeline = self._open(model)
        placement = pipeline.choose_placement(settings)
        work = pipeline.files.workload(settings, windows=windows_per_call(pipeline.family, settings, placement))
        slice_ = find_slice(placement.chip, placement.sizes.device_count)
        memory = estimate_memory(pipeline, settings)
        return StepCost(
            _count_flops(work),
            memory.needed if memory else 0,
            memory.available if memory else 0,
            _plan_seconds(work, slice_) if slice_ is not None else None,
            choose_rows(pipeline, settings),
        )


class SlicePlanner(_Counter):
    """Of workers that are TPU slices of one kind."""

    def __init__(self, slice_: Slice, open_files: Callable[[str], ModelFiles]) -> None:
        self._slice = slice_
        self._open_files = open_files
        super().__init__(self._count_slice)

    def _count_slice(self, model: str, settings: GenerationSettings) -> StepCost:
        from comfy_tpu.parallel.layouts import best_layout, usable_bytes

        files = self._open_files(model)
        work, best = best_layout(files.workloads(settings), self._slice)
        rows = count_rows(files, settings, self._slice.chips)
        return StepCost(_count_flops(work), best.memory.total, usable_bytes(self._slice.chip), best.step_seconds, rows)


def count_rows(files: ModelFiles, settings: GenerationSettings, device_count: int = 1) -> int:
    """The most jobs that share a step on accelerators elsewhere; their memory may have room for fewer."""
    from comfy_tpu.jobs.batch_size import double_rows
    from comfy_tpu.pipeline.step import BUSY_TOKENS, count_tokens

    def pays(rows: int) -> bool:
        tokens = count_tokens(files.family, dataclasses.replace(settings, num_videos=rows))
        return tokens / device_count < BUSY_TOKENS

    return double_rows(pays)


def _count_flops(work: Workload) -> float:
    from comfy_tpu.parallel.chips import parse_slice
    from comfy_tpu.parallel.layouts import estimate

    return work.calls * estimate(work, MeshSizes(), parse_slice("v6e-1")).flops


def _plan_seconds(work: Workload, slice_: Slice) -> float:
    from comfy_tpu.parallel.layouts import rank_layouts

    return rank_layouts(work, slice_)[0].step_seconds
