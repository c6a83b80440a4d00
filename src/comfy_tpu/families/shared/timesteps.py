"""The numbers that become sines: as diffusers rounds them, because they decide the image."""

from __future__ import annotations

import torch

from comfy_tpu.bridge import round_to


def round_timestep(timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A timestep of 0 to 1000. diffusers' pipelines divide it by 1000 and its models multiply it again, each time
    rounded to the model's dtype: 983.6 is 984 in bfloat16."""
    share = round_to(round_to(timestep, dtype) / 1000, dtype)
    return round_to(share * 1000, dtype)


def round_guidance(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The embedded guidance, in thousandths: 3.5 is 3504 in bfloat16, and not 3500."""
    return round_to(round_to(scale, dtype) * 1000, dtype)
