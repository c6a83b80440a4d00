"""Presets: settings that go together, and the files that say which of them they were made for.

A distilled model or LoRA is made for its number of steps, mostly without guidance, at fixed noise levels. Files say so
in their metadata where their makers wrote it there, and otherwise in their names; the keys of a distilled LoRA are
those of any other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Preset
from comfy_tpu.families.settings import guidance_scales
from comfy_tpu.terminal_text import excerpt

AUTO = "auto"
"""In place of a name: the preset that the LoRAs or the model are recognised to be made for, else none."""

METADATA_KEY = "comfy_tpu.preset"
"""The key of a file's metadata whose value is the name of the preset it was made for."""

_TITLE_KEYS = ("modelspec.title", "ss_output_name", "title", "name")
_GENERIC_NAMES = re.compile(
    r"(high|low)[-_ ]?noise[-_ ]?(model|lora)?|pytorch_lora_weights|diffusion_pytorch_model|adapter_model|model", re.I
)
"""File names that say nothing: the folder's name is looked at, too."""
_FOLDERS = 4
"""Folders above such a file: in the hub's cache, snapshots/REVISION/ is between a repository's name and its files."""


@dataclasses.dataclass(frozen=True)
class Recognition:
    """A file or model that was made for a preset."""

    field: str
    """ "lora" or "model"."""
    name: str
    """The file, or the model's name."""
    preset: str
    strength: float = 1.0


@dataclasses.dataclass(frozen=True)
class PresetChoice:
    """The preset of a run, and what is recognised beside it."""

    presets: Mapping[str, Preset]
    """All presets of the model."""
    name: str | None = None
    """The preset in use; None: no preset."""
    recognised: tuple[Recognition, ...] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {} if self.name is None else self.presets[self.name].settings

    def warnings(self, settings: GenerationSettings, *, has_branches: bool) -> Iterator[tuple[str, str]]:
        """Field and sentence for each thing that does not fit the settings. `has_branches`: whether guidance_scale over
        1 is a second forward."""
        for found in self.recognised:
            yield from self._mismatches(found, settings, has_branches)
        if self.name is None:
            return
        preset = self.presets[self.name]
        fits = preset.is_distilled or preset.lora or any(found.preset == self.name for found in self.recognised)
        if not fits:
            sources = f", such as those of {' or '.join(preset.sources)}" if preset.sources else ""
            yield (
                "preset",
                f"preset={self.name} is for a model or a LoRA that was distilled for it{sources}, and none is "
                "recognised here; without one, the result will be poor",
            )

    def _mismatches(
        self, found: Recognition, settings: GenerationSettings, has_branches: bool
    ) -> Iterator[tuple[str, str]]:
        wanted = self.presets[found.preset]
        steps = wanted.settings.get("num_inference_steps", settings.num_inference_steps)
        guidance = wanted.settings.get("guidance_scale", 1.0)
        odd = []
        # Up to twice as many are used by those who want it finer; fewer, or many more, are what it was not made for.
        if not steps <= settings.num_inference_steps <= 2 * steps:
            odd.append(f"num_inference_steps={settings.num_inference_steps}")
        if has_branches and guidance <= 1 < max(guidance_scales(settings)):
            odd.append(f"guidance_scale={max(guidance_scales(settings)):g}")
        if odd:
            made_for = f"{steps} steps" + (f" at guidance_scale {guidance:g}" if has_branches else "")
            yield (
                found.field,
                f"{found.field}={found.name} was distilled for {made_for}, and this run has {' and '.join(odd)}; "
                f"choose preset={found.preset}, or auto",
            )
        if found.field == "lora" and wanted.lora_strength != 1 and found.strength == 1:
            yield (
                "lora",
                f"lora={found.name} is made for strength {wanted.lora_strength:g}, and has 1; give "
                f"{Path(found.name).name}:{wanted.lora_strength:g}",
            )


def describe_settings(settings: Mapping[str, Any]) -> str:
    """The settings of a preset as text: "4 steps, guidance_scale 1, scheduler euler-trailing, flow_shift 5"."""
    steps = settings.get("num_inference_steps")
    others = {name: value for name, value in settings.items() if name != "num_inference_steps" and value != ""}
    texts = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {excerpt(str(value))}"
        for name, value in others.items()
    ]
    return ", ".join([*([] if steps is None else [f"{steps} steps"]), *texts])


def find_preset(presets: Mapping[str, Preset], name: str, model: str, *, takes_auto: bool = True) -> Preset:
    """`takes_auto`: whether "auto" would have been taken in place of the name, for the error."""
    if not presets:
        raise InvalidValueError(
            f"preset={excerpt(str(name))} is given, but model {model} has no presets; leave it out", field="preset"
        )
    if name not in presets:
        raise InvalidValueError(
            f"preset={excerpt(str(name))} is unknown for model {model}; choose from {', '.join(presets)}"
            f"{f', or {AUTO}' if takes_auto else ''}",
            field="preset",
        )
    return presets[name]


def make_choice(
    presets: Mapping[str, Preset], recognised: Iterable[Recognition], name: str | None, model: str
) -> PresetChoice:
    """The preset of this name, or with "auto" the first one that is recognised."""
    found = tuple(recognised)
    if name == AUTO:
        name = next((each.preset for each in found), None)
    elif name is not None:
        find_preset(presets, name, model)
    return PresetChoice(presets, name, found)


def recognise_file(path: Path, metadata: Mapping[str, str], presets: Mapping[str, Preset]) -> str | None:
    """The preset that a file says it was made for: in its metadata, else in its name."""
    said = metadata.get(METADATA_KEY)
    if said in presets:
        return said
    return match_names(file_names(path, metadata), presets)


def file_names(path: Path, metadata: Mapping[str, str]) -> list[str]:
    """Names that may say what a file was made for: titles, its own, and for a generic one those of its folders."""
    names = [*(metadata[key] for key in _TITLE_KEYS if key in metadata), path.stem]
    if _GENERIC_NAMES.fullmatch(path.stem):
        names += [folder.name for folder in path.absolute().parents[:_FOLDERS]]
    return names


def match_names(names: Iterable[str], presets: Mapping[str, Preset]) -> str | None:
    """The preset with a pattern that is found in a name. First patterns go before second ones: "8step" is said more
    clearly than the name of a maker whose files mostly have four."""
    texts = list(names)
    most = max((len(preset.patterns) for preset in presets.values()), default=0)
    for rank in range(most):
        for name, preset in presets.items():
            pattern = preset.patterns[rank] if rank < len(preset.patterns) else None
            if pattern is not None and any(re.search(pattern, text, re.I) for text in texts):
                return name
    return None
