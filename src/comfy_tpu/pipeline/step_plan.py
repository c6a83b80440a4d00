"""Plans the steps of a run on the host, before the first step.

The plan does not depend on the model's outputs, so there is no round trip between steps, and another level of reuse
changes inputs, not programs. A step computes its velocity, or reuses the one before it, scaled; it is guided, or runs
the prompt alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from comfy_tpu.config import GenerationSettings, ReuseConfig
from comfy_tpu.families.settings import guidance_scales
from comfy_tpu.pipeline.reuse import Curve
from comfy_tpu.pipeline.schedule import Schedule

TIMESTEPS = 1000
"""The number of training timesteps of every flow model here; `boundary` is a fraction of it."""


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    timestep: float
    sigma: float
    coefficients: np.ndarray
    """float32 [2 * HISTORY], as in the schedule."""
    guided: bool
    guidance_scale: float = 1.0
    transformer: int = 0
    """The index of the transformer that computes the step."""
    scale: float | None = None
    """The factor on the last velocity, which replaces the model's output. None: the model runs."""

    @property
    def reused(self) -> bool:
        return self.scale is not None


@dataclasses.dataclass(frozen=True)
class Plan:
    steps: tuple[PlannedStep, ...]
    branches: int = 2
    """Branches of a guided step."""

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self.steps)

    @property
    def reused(self) -> tuple[int, ...]:
        """The numbers, from 1, of the steps at which the model does not run."""
        return tuple(number for number, step in enumerate(self.steps, 1) if step.reused)

    @property
    def guided(self) -> int:
        return sum(step.guided for step in self.steps)

    @property
    def unguided(self) -> int:
        return len(self.steps) - self.guided

    @property
    def forwards(self) -> int:
        """Forward passes of one video through the transformer: a guided step that is computed is two or more."""
        return sum(self.branches if step.guided else 1 for step in self.steps if not step.reused)


def make_plan(
    schedule: Schedule,
    settings: GenerationSettings,
    curve: Curve | None,
    config: ReuseConfig = ReuseConfig(),
    *,
    is_guided: Callable[[float], bool] = lambda scale: scale > 1,
    branches: int = 2,
) -> Plan:
    """The plan of a schedule. `curve` None: every step is computed. `is_guided`: that of the model's card. `branches`:
    those of a guided step."""
    count = len(schedule)
    low_noise = [timestep < settings.boundary * TIMESTEPS for timestep in schedule.timesteps.tolist()]
    guidance = [guidance_scales(settings)[second] for second in low_noise]
    last = round(settings.guidance_until * count)
    guided = [index < last and is_guided(scale) for index, scale in enumerate(guidance)]
    scales: list[float | None] = [None] * count
    if curve is not None:
        # A velocity without guidance is another thing than one with it, and one model's another than the other's: the
        # first of each is computed.
        kinds = list(zip(guided, low_noise, strict=True))
        changes = {index for index in range(1, count) if kinds[index] != kinds[index - 1]}
        scales = _scales(schedule, curve, settings.reuse, config, fresh=changes)
    steps = (
        PlannedStep(timestep, sigma, coefficients, guided[index], guidance[index], int(low_noise[index]), scales[index])
        for index, (timestep, sigma, coefficients) in enumerate(schedule.rows())
    )
    return Plan(tuple(steps), branches)


def _scales(
    schedule: Schedule, curve: Curve, threshold: float, config: ReuseConfig, fresh: set[int]
) -> list[float | None]:
    """The scale of each reused step; None for a computed one.

    MagCache's rule: the errors of consecutive reused steps, each of which grows with the distance from the last
    computed step, add up; the step that would bring the sum to the threshold is computed.
    """
    ratios, changes = curve.resample(schedule.sigmas)
    always = round(config.first_computed_fraction * len(schedule))
    found: list[float | None] = []
    distance = total = 0.0
    in_a_row = 0
    for index, (ratio, change) in enumerate(zip(ratios, changes, strict=True)):
        distance += change
        total += distance
        if index < max(always, 1) or index in fresh or in_a_row == config.max_consecutive_reused or total >= threshold:
            distance = total = 0.0
            in_a_row = 0
            found.append(None)
        else:
            in_a_row += 1
            found.append(float(ratio))
    return found
