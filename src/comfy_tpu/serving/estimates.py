"""How long jobs take: as those of the same shape did, or by the work in them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence

from comfy_tpu.config import GenerationSettings
from comfy_tpu.serving.planner import Planner, StepCost

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

    def record(self, model: str, passes: Sequence[GenerationSettings], seconds: float) -> None:
        """A job that was carried out in so many seconds. `passes`: the settings of each denoising."""
        key, work = (model, _shape(passes)), self._work(model, passes)
        with self._lock:
            known = self._measured.pop(key, None)
            average = seconds if known is None else (1 - _NEWEST) * known.seconds + _NEWEST * seconds
            self._measured[key] = _Measured(average, work)  # the last one that was measured is the last in the dict
            if len(self._measured) > _SHAPES_MAX:
                del self._measured[next(iter(self._measured))]

    def predict(self, model: str, passes: Sequence[GenerationSettings]) -> float | None:
        """Seconds of a job; None where nothing is known."""
        with self._lock:
            same = self._measured.get((model, _shape(passes)))
            others = [each for (name, _), each in self._measured.items() if name == model and each.work]
        if same is not None:
            return same.seconds
        work = self._work(model, passes)
        if others and others[-1].work and work:
            return others[-1].seconds * work / others[-1].work
        return self._total(model, passes, lambda cost: cost.seconds)

    def usual_seconds(self) -> float | None:
        """Of a job, over all shapes."""
        with self._lock:
            times = [each.seconds for each in self._measured.values()]
        return sum(times) / len(times) if times else None

    def _work(self, model: str, passes: Sequence[GenerationSettings]) -> float | None:
        return self._total(model, passes, lambda cost: cost.flops)

    def _total(
        self, model: str, passes: Sequence[GenerationSettings], of_step: Callable[[StepCost], float | None]
    ) -> float | None:
        """The sum over all steps; None where it is unknown of one."""
        total = 0.0
        for settings in passes:
            cost = None if self._planner is None else self._planner.cost(model, settings)
            each = None if cost is None else of_step(cost)
            if each is None:
                return None
            total += each * settings.num_inference_steps
        return total


def _shape(passes: Sequence[GenerationSettings]) -> Hashable:
    """What decides how long a job takes."""
    shapes = (dataclasses.asdict(dataclasses.replace(each, seed=0, negative_prompt="", fps=1)) for each in passes)
    return tuple(tuple(sorted((name, repr(value)) for name, value in shape.items())) for shape in shapes)
