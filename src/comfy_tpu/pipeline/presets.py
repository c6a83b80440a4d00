"""The preset of a model directory's run: the LoRA that it brings along, and what the opened files say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from comfy_tpu.config import Lora
from comfy_tpu.families.presets import (
    AUTO,
    PresetChoice,
    Recognition,
    find_preset,
    make_choice,
    match_names,
    recognise_file,
)
from comfy_tpu.pipeline.lora import Loras
from comfy_tpu.pipeline.model_files import ModelFiles


def with_own_lora(files: ModelFiles, loras: Sequence[Lora], name: str | None) -> list[Lora]:
    """The LoRAs and, where the preset brings one of the model directory along that is not among them, that one. Raises
    InvalidValueError for a preset that the model does not have."""
    if name is None or name == AUTO:
        return list(loras)
    preset = find_preset(files.presets, name, files.name)
    own = files.path(preset.lora) if preset.lora else None
    if own is None or any(_is_same(lora.path, own) for lora in loras):
        return list(loras)
    return [*loras, Lora(own)]


def choose_preset(files: ModelFiles, loras: Loras, name: str | None) -> PresetChoice:
    """The preset of this name, or with "auto" the one of the first LoRA that is recognised, else of the model."""
    return make_choice(files.presets, _recognise_all(files, loras), name, files.name)


def _recognise_all(files: ModelFiles, loras: Loras) -> Iterator[Recognition]:
    for lora in loras.opened:
        name = recognise_file(lora.file.path, lora.file.metadata, files.presets)
        if name is not None and lora.strength:
            yield Recognition("lora", str(lora.file.path), name, lora.strength)
    if (name := match_names(files.transformer_names, files.presets)) is not None:
        yield Recognition("model", files.name, name)


def _is_same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()
