"""Tables of coefficients against the schedulers they were taken from."""

from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, DDPMScheduler, EulerAncestralDiscreteScheduler

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.pipeline.schedule import HISTORY, make_schedule

MIXING = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)) * 0.3


def model(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ MIXING) + 0.001 * timestep


def by_scheduler(scheduler: Any, x: torch.Tensor) -> torch.Tensor:
    for timestep in scheduler.timesteps:
        x = scheduler.step(model(x, timestep), timestep, x, return_dict=False)[0]
    return x


def by_table(scheduler: Any, x: torch.Tensor) -> torch.Tensor:
    schedule = make_schedule(scheduler)
    samples, outputs = [x] + [torch.zeros_like(x)] * (HISTORY - 1), [torch.zeros_like(x)] * HISTORY
    for timestep, row in zip(schedule.timesteps, schedule.coefficients, strict=True):
        outputs = [model(samples[0], torch.tensor(timestep)), *outputs[:-1]]
        after = sum(float(weight) * known for weight, known in zip(row, (*samples, *outputs), strict=True))
        samples = [after, *samples[:-1]]
    return samples[0]


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 50])
@pytest.mark.parametrize("name", WAN21.scheduling.factories)
def test_the_table_is_the_scheduler(name: str, steps: int, shift: float) -> None:
    noise = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    settings = GenerationSettings(flow_shift=shift, num_inference_steps=steps)
    assert len(make_schedule(WAN21.scheduling.factories[name](settings))) == steps
    expected = by_scheduler(WAN21.scheduling.factories[name](settings), noise)
    actual = by_table(WAN21.scheduling.factories[name](settings), noise)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_limits_name_every_scheduler() -> None:
    assert set(WAN21.card.limits.schedulers) == set(WAN21.scheduling.factories)


@pytest.mark.parametrize("scheduler", [DDPMScheduler, EulerAncestralDiscreteScheduler])
def test_what_is_not_a_combination_is_refused(scheduler: Any) -> None:
    one = scheduler()
    one.set_timesteps(5)
    with pytest.raises(UnsupportedError, match=f"{scheduler.__name__} is not a combination .*choose another scheduler"):
        make_schedule(one)


def test_a_scheduler_without_sigmas() -> None:
    """DDIM keeps the share of the image in its alphas instead; its step is as linear as any."""
    one, other = (CogVideoXDDIMScheduler(prediction_type="v_prediction") for _ in range(2))
    for scheduler in (one, other):
        scheduler.set_timesteps(4)
    left = one.alphas_cumprod[one.timesteps]
    torch.testing.assert_close(torch.from_numpy(make_schedule(other).sigmas), (1 - left).sqrt().float())
    sample = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(by_table(other, sample), by_scheduler(one, sample), rtol=1e-4, atol=1e-4)
