"""A family beside diffusers' own pipeline, on a small random model: what the parity tests of ported families share.

A test needs one ParityCase. The test file in a checkout is tests/families/test_ported_parity.py; a pack has its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import RuntimeConfig, ShardingConfig
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.noise import initial_noise
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.porting.scaffold.hypotheses import LAYOUTS
from comfy_tpu.porting.scaffold.small_pipeline import build_pipeline

PROMPT, NEGATIVE_PROMPT, SEED = "a red circle moving left", "black background", 7
MESHES = ("single", "dp=2,tp=4", "dp=2,sp=4")
SAME = 80
"""dB. Over 100 are found; a prompt that is not read changes these small models by less than 60."""
CHANGES: tuple[Mapping[str, Any], ...] = (
    {"prompt": "a blue circle"},
    {"guidance_scale": 2.0},
    {"negative_prompt": "red"},
    {"seed": 8},
)
"""Settings that must change the result by more than `SAME` tells apart."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParityCase:
    """A small pipeline of diffusers, and the settings it is run with."""

    model: str
    """The name in the model's card."""
    pipeline: str
    """The class in diffusers."""
    classes: Mapping[str, str]
    """The classes of its parts, by the name of their folder."""
    configs: Mapping[str, Mapping[str, Any]]
    """Configurations of the parts; what is left out is the class's default."""
    settings: Mapping[str, Any]
    """Settings of both pipelines."""
    layout: str
    """The name of the layout of diffusers' latents, in LAYOUTS."""
    pipeline_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of diffusers' pipeline alone."""


@functools.cache
def diffusers_pipeline(case: ParityCase) -> Any:
    return build_pipeline(case.pipeline, case.classes, case.configs)


@functools.cache
def model_directory(case: ParityCase) -> Path:
    """The small model on disk, deleted when the process ends."""
    directory = tempfile.mkdtemp(prefix="comfy-tpu-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    diffusers_pipeline(case).save_pretrained(directory)
    return Path(directory)


@functools.cache
def open_case(case: ParityCase, mesh: str = "single") -> VideoPipeline:
    return VideoPipeline.open(model_directory(case), RuntimeConfig(mesh=mesh))


def generate(case: ParityCase, mesh: str = "single", prompt: str = PROMPT, **changes: Any) -> torch.Tensor:
    """Our frames [frames, height, width, 3] in 0..1."""
    pipeline = open_case(case, mesh)
    settings = pipeline.settings(**{"seed": SEED, "negative_prompt": NEGATIVE_PROMPT, **case.settings, **changes})
    return torch.cat(list(pipeline.generate(prompt, settings)), dim=1)[0]


@functools.cache
def generate_with_diffusers(case: ParityCase) -> torch.Tensor:
    """diffusers' frames from the same noise, in the same shape."""
    pipeline = open_case(case)
    layout = next(each for each in LAYOUTS if each.name == case.layout)
    noise = layout.from_latents(initial_noise(pipeline.latent_shape(pipeline.settings(**case.settings)), SEED))
    frames: torch.Tensor = diffusers_pipeline(case)(
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        latents=noise,
        **case.settings,
        **case.pipeline_options,
        output_type="pt",
        return_dict=False,
    )[0]
    return frames[0].permute(0, 2, 3, 1) if frames.ndim == 5 else frames.permute(0, 2, 3, 1)


def load_transformer(case: ParityCase, mesh: str) -> None:
    """Loads the weights with every one of them in pieces, however small. Raises where one has no rule, or two."""
    pipeline = open_case(case)
    spec = pipeline.family.transformer
    sharding = ShardingConfig(gather_min_bytes=0)
    component = Component(
        spec, pipeline.files.config(spec), make_placement(mesh), dtype=torch.float32, sharding=sharding
    )
    component.load(Checkpoint.open(pipeline.directory / spec.name))


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    """dB between two results in 0..1; 200 where they are equal."""
    error = (one.double() - other.double()).square().mean()
    return float(-10 * torch.log10(error.clamp_min(1e-20)))
