"""diffusers' schedulers as tables of coefficients, so that latents never leave the device between steps.

A deterministic scheduler is linear: each new sample is a combination of earlier samples and model outputs, with
weights that depend on the step only. Running the scheduler once on the host, with unit vectors in place of samples and
outputs, gives those weights. The device then needs one small weighted sum per step, which is the same program for every
step and every scheduler, and no scheduler is reimplemented here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from comfy_tpu.errors import UnsupportedError

HISTORY = 3
"""The number of samples, and of outputs, that a step may use. Two-step solvers with a corrector (UniPC) need three."""

_TOLERANCE = 2e-6


@dataclasses.dataclass(frozen=True)
class Schedule:
    timesteps: np.ndarray
    """float32 [steps]: the timesteps that are given to the transformer."""
    sigmas: np.ndarray
    """float32 [steps]: the share of noise in the sample at the beginning of the step."""
    coefficients: np.ndarray
    """float32 [steps, 2 * HISTORY]: weights of the last samples, newest first, then of the last outputs."""

    def rows(self) -> Iterator[tuple[float, float, np.ndarray]]:
        """Timestep, sigma and coefficients of each step."""
        return zip(self.timesteps.tolist(), self.sigmas.tolist(), self.coefficients, strict=True)

    def __len__(self) -> int:
        return len(self.timesteps)

    @classmethod
    def read(cls, written: Mapping[str, list[Any]]) -> Schedule:
        return cls(**{name: np.array(values, np.float32) for name, values in written.items()})

    def write(self) -> dict[str, list[Any]]:
        """JSON data, for `read`; a float32 comes back as it was."""
        return {field.name: getattr(self, field.name).tolist() for field in dataclasses.fields(self)}


def make_schedule(scheduler: Any, begin: int = 0) -> Schedule:
    """The table of a diffusers scheduler whose timesteps are set. The scheduler cannot be used again.

    `begin`: the first step that is run; a run that starts from an image leaves the steps before it out.
    """
    timesteps = scheduler.timesteps[begin:]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    # Everything is a vector of weights: entry 0 for the first sample, entry i + 1 for the output of step i.
    unit = torch.eye(len(timesteps) + 1, dtype=torch.float64)
    samples, outputs, table = [unit[0]], [], []
    for index, timestep in enumerate(timesteps):
        outputs.append(unit[index + 1])
        # [1, n]: solvers take dimension 0 for the batch.
        after = scheduler.step(outputs[-1][None], timestep, samples[-1][None], return_dict=False)[0][0]
        table.append(_weights(after.double(), samples, outputs, scheduler))
        samples.append(after.double())
    sigmas = noise_levels(scheduler, begin, timesteps)
    return Schedule(
        timesteps.numpy().astype(np.float32), sigmas.numpy().astype(np.float32), np.array(table, np.float32)
    )


def noise_levels(scheduler: Any, begin: int, timesteps: torch.Tensor) -> torch.Tensor:
    """The share of noise at each of the timesteps; `begin`: the number of steps that are left out."""
    if hasattr(scheduler, "sigmas"):
        levels: torch.Tensor = scheduler.sigmas[begin : begin + len(timesteps)]
        return levels
    # DDIM and its kind keep what is left of the image's variance, by the timestep.
    left: torch.Tensor = scheduler.alphas_cumprod[timesteps.long()]
    return (1 - left).sqrt()


def _weights(
    after: torch.Tensor, samples: list[torch.Tensor], outputs: list[torch.Tensor], scheduler: Any
) -> list[float]:
    """The weights of the latest samples and outputs whose sum is `after`; the fewest that suffice."""
    for depth in range(1, HISTORY + 1):
        known = [*samples[-depth:][::-1], *outputs[-depth:][::-1]]
        basis, wanted = torch.stack(known, dim=1).numpy(), after.numpy()
        # numpy's, not torch's: the same numbers, but torch's gelsd takes 1 to 4 s for 50 steps on two busy cores.
        found = np.linalg.lstsq(basis, wanted, rcond=None)[0]
        if np.abs(basis @ found - wanted).max() <= _TOLERANCE * np.abs(wanted).max():
            count = min(depth, len(samples))
            padding = [0.0] * (HISTORY - count)
            return [*found[:count].tolist(), *padding, *found[count:].tolist(), *padding]
    raise UnsupportedError(
        f"{type(scheduler).__name__} is not a combination of the last {HISTORY} samples and outputs (it is random, "
        "clips, or looks back further); choose another scheduler"
    )
