"""Everything that the files of a new family are written from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import GenerationSettings
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


@dataclasses.dataclass(frozen=True)
class Facts:
    name: str
    """Of the file, and in capitals of the family."""
    source: Source
    learned: Learned
    proposal: Proposal
    configs: Mapping[str, Mapping[str, Any]]
    """Of the small pipeline."""
    model_id: str
    """On the hub."""
    defaults: GenerationSettings

    @property
    def constant(self) -> str:
        return self.name.upper()

    @property
    def title(self) -> str:
        return self.source.title

    @property
    def key(self) -> str:
        """What the ids of its nodes begin with."""
        return self.title

    @property
    def template(self) -> str:
        """The example workflow."""
        return template_of(self.name)

    @property
    def picture(self) -> bool:
        return self.learned.picture

    @property
    def noun(self) -> str:
        return "picture" if self.picture else "video"

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
    def written_defaults(self) -> str:
        """In Python: what is not as in every family."""
        chosen = {field.name: getattr(self.defaults, field.name) for field in dataclasses.fields(GenerationSettings)}
        own = {name: value for name, value in chosen.items() if value != getattr(GenerationSettings, name)}
        return f"GenerationSettings({', '.join(f'{name}={value!r}' for name, value in own.items())})"

    @property
    def extras(self) -> dict[str, str]:
        """Embeddings besides "text" -> what a CONDITIONING calls them."""
        return {
            each.name: "pooled_output" if each.name == "pooled" else f"tpu_{each.name}"
            for each in self.learned.embeddings
            if each.name != "text"
        }


def template_of(name: str) -> str:
    return f"{name}_tpu_basic"


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
    frames = 1 if learned.picture else given.get("num_frames") or config.get("sample_frames") or 49
    short = "euler" if learned.scheduler else own_scheduler(source.parts["scheduler"].__name__)
    return GenerationSettings(
        height=int(sides["height"]),
        width=int(sides["width"]),
        num_frames=(int(frames) - 1) // learned.frames_multiple * learned.frames_multiple + 1,
        num_inference_steps=int(given.get("num_inference_steps") or 50),
        guidance_scale=float(given.get("guidance_scale") or 5.0),
        flow_shift=float(scheduler.get("shift") or 1.0),
        scheduler=short,
        fps=GenerationSettings.fps if learned.picture else _fps(source),
        max_sequence_length=int(given.get("max_sequence_length") or 256),
    )
