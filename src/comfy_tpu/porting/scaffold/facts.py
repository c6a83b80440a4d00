"""Everything that the files of a new family are written from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import GUIDE, UnsupportedError
from comfy_tpu.porting.scaffold.pipelines import Source
from comfy_tpu.porting.scaffold.proposing import Proposal
from comfy_tpu.porting.scaffold.runs import Learned

_SHORT = (
    ("UniPC", "unipc"),
    ("DPMSolver", "dpm++"),
    ("DDIM", "ddim"),
    ("DPM", "dpm"),
    ("EulerDiscrete", "euler"),
    ("DEIS", "deis"),
)

SIZE_MIN = 256
"""The smallest height and width of a node, as in comfy/inputs.py, which only ComfyUI can import."""


@dataclasses.dataclass(frozen=True)
class Facts:
    name: str
    """The NAME of the command."""
    package: str
    """The importable package of the family."""
    source: Source
    learned: Learned
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
    def makes_images(self) -> bool:
        return self.learned.makes_images

    @property
    def noun(self) -> str:
        return "image" if self.makes_images else "video"

    @property
    def schedulers(self) -> tuple[str, ...]:
        if self.learned.scheduler:
            return ("euler", "unipc", "dpm++")
        return (own_scheduler(self.source.parts["scheduler"].__name__),)

    @property
    def patch(self) -> tuple[int, int, int]:
        return patch_of(self.source.full_config("transformer"))

    @property
    def size_multiple(self) -> int:
        """Pixels of a token's side."""
        return self.learned.spatial_scale * self.patch[1]

    @property
    def defaults_expression(self) -> str:
        """The defaults in Python, without those that every family has."""
        chosen = {field.name: getattr(self.defaults, field.name) for field in dataclasses.fields(GenerationSettings)}
        own = {name: value for name, value in chosen.items() if value != getattr(GenerationSettings, name)}
        return f"GenerationSettings({', '.join(f'{name}={value!r}' for name, value in own.items())})"

    @property
    def conditioning_keys(self) -> dict[str, str]:
        """Embeddings besides "text" -> their keys in a CONDITIONING."""
        return {
            each.name: "pooled_output" if each.name == "pooled" else f"tpu_{each.name}"
            for each in self.learned.embeddings
            if each.name != "text"
        }


def check_sizes(facts: Facts) -> None:
    """Raises UnsupportedError for sizes that a node cannot offer: a widget's values are its smallest plus steps."""
    if SIZE_MIN % facts.size_multiple:
        raise UnsupportedError(
            f"sizes of {facts.title} are multiples of {facts.size_multiple}, and the smallest of a node, {SIZE_MIN}, "
            f"is none; write the family by hand, {GUIDE} says how. Nothing was written"
        )


def own_scheduler(class_name: str) -> str:
    return next((short for part, short in _SHORT if part in class_name), class_name.removesuffix("Scheduler").lower())


def patch_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Latents of a token, by frames, height and width."""
    patch = config.get("patch_size", 1)
    if isinstance(patch, (tuple, list)):
        frames, height, width = patch
        return int(frames), int(height), int(width)
    return int(config.get("patch_size_t") or 1), int(patch or 1), int(patch or 1)


def _fps(source: Source) -> int:
    """As the pipeline's own example saves its video."""
    try:
        found = re.search(r"fps=(\d+)", Path(inspect.getfile(source.pipeline)).read_text(encoding="utf-8"))
    except OSError:
        found = None
    return int(found[1]) if found else GenerationSettings.fps


def default_settings(source: Source, learned: Learned) -> GenerationSettings:
    """What the pipeline does when nothing is said."""
    given = {name: each.default for name, each in inspect.signature(source.pipeline.__call__).parameters.items()}
    config = source.full_config("transformer")
    sides = {
        side: given.get(side)
        or (config.get(f"sample_{side}") or config.get("sample_size") or 64) * learned.spatial_scale
        for side in ("height", "width")
    }
    scheduler = source.full_config("scheduler") if learned.scheduler else {}
    frames = 1 if learned.makes_images else given.get("num_frames") or config.get("sample_frames") or 49
    short = "euler" if learned.scheduler else own_scheduler(source.parts["scheduler"].__name__)
    return GenerationSettings(
        height=int(sides["height"]),
        width=int(sides["width"]),
        num_frames=(int(frames) - 1) // learned.frames_multiple * learned.frames_multiple + 1,
        num_inference_steps=int(given.get("num_inference_steps") or 50),
        guidance_scale=float(given.get("guidance_scale") or 5.0),
        flow_shift=float(scheduler.get("shift") or 1.0),
        scheduler=short,
        fps=GenerationSettings.fps if learned.makes_images else _fps(source),
        max_sequence_length=int(given.get("max_sequence_length") or 256),
    )
