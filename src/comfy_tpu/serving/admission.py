"""Refuses what cannot be carried out, or would take too long, before it is queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.serving.estimates import Estimator
from comfy_tpu.serving.planner import Planner, StepCost

_TRIES_MAX = 8
"""Smaller shapes whose memory is counted, for the answer."""


class TooLargeError(InvalidValueError):
    """A job does not fit, or would take too long."""


@dataclasses.dataclass(frozen=True)
class Admission:
    planner: Planner | None
    """None: nothing is known of the workers' devices."""
    estimator: Estimator
    job_seconds: float | None = None
    """The longest that a job may take; None: any time."""

    def admit(self, model: str, card: ModelCard, passes: Sequence[GenerationSettings]) -> float | None:
        """The seconds that the job will take, as far as is known. `passes`: the settings of each denoising. Raises
        TooLargeError."""
        first, *later = passes
        self._check_memory(model, card, first)
        for larger in later:
            self._check_second_pass(model, larger)
        seconds = self.estimator.predict(model, passes)
        if seconds is not None and self.job_seconds is not None and seconds > self.job_seconds:
            steps = int(first.num_inference_steps * self.job_seconds / seconds)
            advice = f"{steps} steps would fit" if steps else "choose a smaller size or fewer frames"
            if later:
                advice = "choose fewer steps or a smaller size, or leave upscale out"
            described = " and ".join(f"{each.num_inference_steps} steps of {_describe(each)}" for each in passes)
            raise TooLargeError(
                f"{described} would take about {seconds:.0f} s, and {self.job_seconds:.0f} s are the most here; "
                f"{advice}",
                field="num_inference_steps",
            )
        return seconds

    def _check_second_pass(self, model: str, larger: GenerationSettings) -> None:
        cost = None if self.planner is None else self.planner.cost(model, larger)
        if cost is not None and cost.needed_bytes and not cost.fits:
            raise TooLargeError(
                f"upscale makes it {_describe(larger)}, which {_describe_memory(cost)}; choose a smaller factor, or "
                "leave it out",
                field="upscale",
            )

    def _check_memory(self, model: str, card: ModelCard, settings: GenerationSettings) -> None:
        cost = None if self.planner is None else self.planner.cost(model, settings)
        if cost is None or not cost.needed_bytes or cost.fits:
            return
        fitting = (each for each in _smaller(card, settings) if self._fits(model, each))
        smaller = next(fitting, None)
        advice = f"{_describe(smaller)} would fit" if smaller else "choose a smaller size or fewer frames"
        raise TooLargeError(
            f"{_describe(settings)} {_describe_memory(cost)}; {advice}",
            field="size",
        )

    def _fits(self, model: str, settings: GenerationSettings) -> bool:
        assert self.planner is not None
        cost = self.planner.cost(model, settings)
        return cost is not None and cost.fits


def _smaller(card: ModelCard, settings: GenerationSettings) -> Iterator[GenerationSettings]:
    """Settings with less in them: one video, then fewer frames, then the model's own smaller sizes."""
    tried = 0
    if settings.num_videos > 1:
        settings = dataclasses.replace(settings, num_videos=1)
        yield settings
    frames, multiple = settings.num_frames, card.limits.frames_multiple
    while frames > multiple + 1 and tried < _TRIES_MAX // 2:
        frames = max(1, (frames // 2) // multiple * multiple + 1)
        tried += 1
        yield dataclasses.replace(settings, num_frames=frames)
    sizes = [(size["width"], size["height"]) for size in card.sizes.values() if {"width", "height"} <= set(size)]
    area = settings.width * settings.height
    for width, height in sorted(sizes, key=lambda size: -size[0] * size[1]):
        if width * height < area and tried < _TRIES_MAX:
            tried += 1
            yield dataclasses.replace(settings, width=width, height=height, num_frames=frames)


def _describe_memory(cost: StepCost) -> str:
    return (
        f"needs about {cost.needed_bytes / 1e9:.1f} GB on each device, and {cost.available_bytes / 1e9:.1f} GB can be "
        "used"
    )


def _describe(settings: GenerationSettings) -> str:
    size = f"{settings.width}x{settings.height}"
    frames = f" with {settings.num_frames} frames" if settings.num_frames > 1 else ""
    return f"{size}{frames}" if settings.num_videos == 1 else f"{settings.num_videos} times {size}{frames}"
