"""Everything that the files of a new family are written from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import GUIDE, UnsupportedError
from comfy_tpu.porting.scaffold.learner import PipelineCalls
from comfy_tpu.porting.scaffold.pipelines import Source
from comfy_tpu.porting.scaffold.proposal import Proposal

_SCHEDULER_NAMES = {
    "UniPC": "unipc",
    "DPMSolver": "dpm++",
    "DDIM": "ddim",
    "DPM": "dpm",
    "EulerDiscrete": "euler",
    "DEIS": "deis",
}
"""Short names by a part of the class's name; the first that fits."""

SIZE_MIN = 256
"""The smallest height and width of a node, as in comfy/inputs.py, which only ComfyUI can import."""


@dataclasses.dataclass(frozen=True)
class Facts:
    name: str
    """The NAME of the command."""
    package: str
    """The importable package of the family."""
    source: Source
    calls: PipelineCalls
    proposal: Proposal
    configs: Mapping[str, Mapping[str, Any]]
    """Configurations of the small pipeline."""
    model_id: str
    """The model on the hub."""
    defaults: GenerationSettings

    @property
    def title(self) -> str:
        """The model's name in tables, and the prefix of its node ids."""
        return self.source.title

    @property
    def noun(self) -> str:
        return "image" if self.calls.makes_images else "video"

    @property
    def schedulers(self) -> tuple[str, ...]:
        return ("euler", "unipc", "dpm++") if self.calls.scheduler else (self.defaults.scheduler,)

    @property
    def size_multiple(self) -> int:
        """Pixels of a token's side."""
        return self.calls.spatial_scale * patch_height(self.source.full_config("transformer"))


def check_sizes(facts: Facts) -> None:
    """Raises UnsupportedError for sizes that a node cannot offer: a widget's values are its smallest plus steps."""
    if SIZE_MIN % facts.size_multiple:
        raise UnsupportedError(
            f"sizes of {facts.title} are multiples of {facts.size_multiple}, and the smallest of a node, {SIZE_MIN}, "
            f"is none; write the family by hand, {GUIDE} says how. Nothing was written"
        )


def scheduler_name(class_name: str) -> str:
    short = (name for part, name in _SCHEDULER_NAMES.items() if part in class_name)
    return next(short, class_name.removesuffix("Scheduler").lower())


def patch_height(config: Mapping[str, Any]) -> int:
    """Latents of a token's side; a patch is a number, or (frames, height, width)."""
    patch = config.get("patch_size", 1)
    return int(patch[1] if isinstance(patch, (tuple, list)) else patch or 1)


def default_settings(source: Source, calls: PipelineCalls) -> GenerationSettings:
    """The pipeline's own defaults; frames a second as its own example saves a video."""
    given = {name: each.default for name, each in inspect.signature(source.pipeline.__call__).parameters.items()}
    config = source.full_config("transformer")
    height, width = (
        given.get(side) or (config.get(f"sample_{side}") or config.get("sample_size") or 64) * calls.spatial_scale
        for side in ("height", "width")
    )
    scheduler = source.full_config("scheduler") if calls.scheduler else {}
    frames = 1 if calls.makes_images else given.get("num_frames") or config.get("sample_frames") or 49
    fps = None if calls.makes_images else re.search(r"fps=(\d+)", source.code)
    return GenerationSettings(
        height=int(height),
        width=int(width),
        num_frames=(int(frames) - 1) // calls.frames_multiple * calls.frames_multiple + 1,
        num_inference_steps=int(given.get("num_inference_steps") or 50),
        guidance_scale=float(given.get("guidance_scale") or 5.0),
        flow_shift=float(scheduler.get("shift") or 1.0),
        scheduler="euler" if calls.scheduler else scheduler_name(source.parts["scheduler"].__name__),
        fps=int(fps[1]) if fps else GenerationSettings.fps,
        max_sequence_length=int(given.get("max_sequence_length") or 256),
    )
