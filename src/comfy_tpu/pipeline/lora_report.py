"""What a LoRA file holds, and how much of it has a place in a model: known from headers, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Preset
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.presets import recognise_file
from comfy_tpu.families.registry import find_published, load_family
from comfy_tpu.pipeline.lora import NOISE, OpenLora, check_match, group_layers, noise_of_name
from comfy_tpu.pipeline.lora_keys import LoraFile, LoraMatch, Targets, make_targets
from comfy_tpu.pipeline.model_files import ModelFiles, find_local
from comfy_tpu.pipeline.single_files import published_shapes


@dataclasses.dataclass(frozen=True)
class LoraTargets:
    """The transformer of a model, as far as a LoRA is concerned."""

    model: str
    family: ModelFamily
    targets: Targets
    presets: Mapping[str, Preset]

    @classmethod
    def find(cls, model: str) -> LoraTargets:
        """Of a demo model, a directory, or a hub id; one that is not on this machine is known by its published
        configuration, and not downloaded."""
        directory = find_local(model)
        if directory is None and (published := find_published(model)) is not None:
            hub_id, card = published
            family, shapes = load_family(card.name), published_shapes(card.name, hub_id)
            tensors = {name: TensorInfo(name, shape, torch.bfloat16, Path()) for name, shape in shapes.items()}
            return cls(hub_id, family, make_targets(tensors, family.denoiser.lora_names), card.presets)
        files = ModelFiles.open(model if directory is None else directory, name=model, to_run=False)
        tensors = dict(files.checkpoint(files.family.transformer).tensors)
        targets = make_targets(tensors, files.family.denoiser.lora_names)
        return cls(files.name, files.family, targets, files.presets)


@dataclasses.dataclass(frozen=True)
class LoraReport:
    """A LoRA file beside a model."""

    path: Path
    model: str
    family: str
    style: str
    """Whose names the keys have: "diffusers", "kohya" or "ComfyUI"."""
    ranks: tuple[int, ...]
    """All ranks, rising."""
    scales: tuple[float, ...]
    """All values of alpha over rank, rising; 1 where the file has no alpha."""
    low_rank: int
    """Modules that are changed by a product of two factors."""
    differences: int
    """Weights that are changed by a tensor of their own size: norms, tables, a first convolution."""
    biases: int
    matched_modules: int
    modules: int
    unmatched_keys: tuple[str, ...]
    """Keys that the model has no place for, those of all layers as one."""
    text_keys: int
    """Keys of a text encoder, which are left out."""
    noise: str
    """The transformer of two that the file is for, by its name: "high", "low" or "all"."""
    preset: str | None
    """The preset that the file is recognised to be made for."""
    preset_settings: Mapping[str, Any]
    strength: float
    """The strength that it is made for."""
    metadata: Mapping[str, str]
    problem: str | None
    """Why the model refuses the file; None: it is applied."""

    def as_document(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path), "schema": 1}


def report_lora(path: Path, place: LoraTargets) -> LoraReport:
    """Raises InvalidValueError or CheckpointError for a file that is no LoRA."""
    file = LoraFile.open(path)
    try:
        matched = file.match(place.targets)
        problem = None
        try:
            check_match(path, file, matched, place.targets, place.model, place.family.name)
        except InvalidValueError as error:
            problem = str(error)
        return _make_report(file, matched, place, problem)
    finally:
        file.checkpoint.close()


def _make_report(file: LoraFile, matched: LoraMatch, place: LoraTargets, problem: str | None) -> LoraReport:
    parts = [part for parts in file.modules.values() for part in parts]
    downs = [file.checkpoint.tensors[each["down"]].shape for each in file.modules.values() if "down" in each]
    products = [factors for factors in matched.factors.values() if factors.up is not None]
    preset = recognise_file(file.path, file.metadata, place.presets)
    has_pair = len(place.family.denoiser.transformers) == len(NOISE)
    return LoraReport(
        path=file.path,
        model=place.model,
        family=place.family.name,
        style=_style(file),
        ranks=tuple(sorted({shape[0] for shape in downs if shape})),
        scales=tuple(sorted({round(factors.scale, 6) for factors in products})),
        low_rank=parts.count("down"),
        differences=parts.count("difference"),
        biases=parts.count("bias"),
        matched_modules=matched.known_modules,
        modules=matched.known_modules + matched.unknown_modules,
        unmatched_keys=tuple(group_layers(matched.unknown_keys)),
        text_keys=len(matched.text_keys),
        noise=(noise_of_name(file.path) if has_pair else None) or "all",
        preset=preset,
        preset_settings={} if preset is None else dict(place.presets[preset].settings),
        strength=1.0 if preset is None else place.presets[preset].lora_strength,
        metadata=dict(file.metadata),
        problem=problem,
    )


def summarize(lora: OpenLora, presets: Mapping[str, Preset]) -> str:
    """One line of a LoRA that is in use."""
    total = lora.matched.known_modules + lora.matched.unknown_modules
    shapes = [lora.file.checkpoint.tensors[each["down"]].shape for each in lora.file.modules.values() if "down" in each]
    noise = "" if lora.noise == "all" else f", for {lora.noise} noise"
    preset = recognise_file(lora.file.path, lora.file.metadata, presets)
    made_for = "" if preset is None else f", made for preset {preset}"
    return (
        f"lora {lora.file.path.name} at strength {lora.strength:g}: {lora.matched.known_modules} of {total} modules fit"
        f"{format_ranks(shape[0] for shape in shapes if shape)}{noise}{made_for}"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """ ", rank 32", or ", ranks 4 to 64"; empty without any."""
    found = sorted(set(ranks))
    if not found:
        return ""
    return f", rank {found[0]}" if len(found) == 1 else f", ranks {found[0]} to {found[-1]}"


def _style(file: LoraFile) -> str:
    keys = list(file.checkpoint.tensors)
    if any(key.startswith(("lora_unet_", "lora_transformer_")) for key in keys):
        return "kohya"
    if any(key.startswith(("diffusion_model.", "model.diffusion_model.")) for key in keys):
        return "ComfyUI"
    return "diffusers"
