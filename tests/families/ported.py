"""What the tests of families that `comfy-tpu port new` wrote have in common: a video of ours and of diffusers'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline.noise import initial_noise
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import psnr as psnr
from tests.parity.small_models import temporary_directory

PROMPT, NEGATIVE = "a red circle moving left", "black background"
SEED = 7
SAME = 80
"""dB. What is found is over 100; a prompt that is not read changes these small models by less than 60."""


@functools.cache
def saved(reference: Callable[[], Any]) -> Path:
    path = temporary_directory()
    reference().save_pretrained(path)
    return path


@functools.cache
def opened(reference: Callable[[], Any], mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(saved(reference), RuntimeConfig(mesh=mesh))


def made(pipeline: VideoPipeline, chosen: Mapping[str, Any], prompt: str = PROMPT, **changed: Any) -> torch.Tensor:
    """[frames, height, width, 3]."""
    settings = pipeline.settings(**{"seed": SEED, "negative_prompt": NEGATIVE, **chosen, **changed})
    return torch.cat(list(pipeline.generate(prompt, settings)), dim=1)[0]


def expected(
    reference: Any,
    pipeline: VideoPipeline,
    chosen: Mapping[str, Any],
    layout: Callable[[torch.Tensor], torch.Tensor],
    **own: Any,
) -> torch.Tensor:
    """What diffusers makes of the same noise. `layout`: our latents, as its pipeline has them."""
    settings = pipeline.settings(**chosen)
    noise = layout(initial_noise(pipeline.latent_shape(settings), SEED))
    given = {**{name: value for name, value in chosen.items() if name != "scheduler"}, **own}
    frames = reference(
        prompt=PROMPT, negative_prompt=NEGATIVE, latents=noise, **given, output_type="pt", return_dict=False
    )[0]
    return frames[0].permute(0, 2, 3, 1) if frames.ndim == 5 else frames.permute(0, 2, 3, 1)
