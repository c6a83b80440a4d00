"""How long jobs take: as those of the same shape did, or by the work in them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable

from comfy_tpu.config import GenerationSettings
from comfy_tpu.serving.planner import Planner

_NEWEST = 0.3
"""The share of the newest job in the average of its shape."""
_SHAPES_MAX = 1000
"""Shapes that are remembered: clients choose them, and any number of them."""


@dataclasses.dataclass(frozen=True)
class _Measured:
    seconds: float
    work: float | None
    """Floating-point operations of all steps; None where they cannot be counted."""


class Estimator:
    """May be used from any thread."""

    def __init__(self, planner: Planner | None) -> None:
        self._planner = planner
        self._measured: dict[tuple[str, Hashable], _Measured] = {}
        self._lock = threading.Lock()

    def record(self, model: str, settings: GenerationSettings, seconds: float) -> None:
        """A job that was carried out in so many seconds."""
        key, work = (model, _shape(settings)), self._work(model, settings)
        with self._lock:
            known = self._measured.pop(key, None)
            average = seconds if known is None else (1 - _NEWEST) * known.seconds + _NEWEST * seconds
            self._measured[key] = _Measured(average, work)  # the last one that was measured is the last in the dict
            if len(self._measured) > _SHAPES_MAX:
                del self._measured[next(iter(self._measured))]

    def predict(self, model: str, settings: GenerationSettings) -> float | None:
        """Seconds of a job; None where nothing is known."""
        with self._lock:
            same = self._measured.get((model, _shape(settings)))
            others = [each for (name, _), each in self._measured.items() if name == model and each.work]
        if same is not None:
            return same.seconds
        work = self._work(model, settings)
        if others and others[-1].work and work:
            return others[-1].seconds * work / others[-1].work
        cost = None if self._planner is None else self._planner.cost(model, settings)
        if cost is None or cost.seconds is None:
            return None
        return cost.seconds * settings.num_inference_steps

    def usual_seconds(self) -> float | None:
        """Of a job, over all shapes."""
        with self._lock:
            times = [each.seconds for each in self._measured.values()]
        return sum(times) / len(times) if times else None

    def _work(self, model: str, settings: GenerationSettings) -> float | None:
        cost = None if self._planner is None else self._planner.cost(model, settings)
        return None if cost is None else cost.flops * settings.num_inference_steps


def _shape(settings: GenerationSettings) -> Hashable:
    """What decides how long a job takes."""
    values = dataclasses.asdict(dataclasses.replace(settings, seed=0, negative_prompt="", fps=1))
    return tuple(sorted((name, repr(value)) for name, value in values.items()))
