"""What a LoRA file holds, and how much of it has a place in a model: known from headers, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Preset
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.presets import recognise_file
from comfy_tpu.families.registry import find_published, load_family
from comfy_tpu.pipeline.lora import NOISE, OpenLora, check_match, describe_misfits, group_layers, noise_of_name
from comfy_tpu.pipeline.lora_algebra import FACTORS, WHOLE, find_rank
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
    def find(cls, model: str, ignored_keys: Collection[str] = ()) -> LoraTargets:
        """Of a demo model, a directory, or a hub id; one that is not on this machine is known by its published
        configuration, and not downloaded. `ignored_keys`: see `RuntimeConfig.ignored_config_keys`."""
        directory = find_local(model)
        if directory is None and (published := cls.from_published(model)) is not None:
            return published
        place = model if directory is None else directory
        files = ModelFiles.open(place, name=model, to_run=False, ignored_keys=ignored_keys)
        tensors = files.checkpoint(files.family.transformer).tensors
        targets = make_targets(tensors, files.family.denoiser.lora_names)
        return cls(files.name, files.family, targets, files.presets)

    @classmethod
    def from_published(cls, model: str) -> LoraTargets | None:
        """Of a model whose configuration is built in; None for another."""
        if (published := find_published(model)) is None:
            return None
        hub_id, card = published
        family, shapes = load_family(card.name), published_shapes(card.name, hub_id)
        tensors = {name: TensorInfo(name, shape, torch.bfloat16, Path()) for name, shape in shapes.items()}
        return cls(hub_id, family, make_targets(tensors, family.denoiser.lora_names), card.presets)


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
    """Modules that are changed by a product of factors."""
    differences: int
    """Weights that are changed by a tensor of their own size: norms, tables, a first convolution."""
    biases: int
    matched_modules: int
    modules: int
    unmatched_keys: tuple[str, ...]
    """Keys that the model has no place for, those of all layers as one."""
    misfits: tuple[str, ...]
    """Weights that are not merged because the model has them in another shape, those of all layers as one."""
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


def check_before_download(loras: Sequence[Lora], model: str) -> None:
    """Raises InvalidValueError or CheckpointError for a LoRA that does not fit a published model, where that is not on
    this machine yet."""
    if not loras or find_local(model) is not None or (place := LoraTargets.from_published(model)) is None:
        return
    for lora in loras:
        file = LoraFile.open(lora.path)
        try:
            check_match(lora.path, file, file.match(place.targets), place.targets, place.model, place.family.name)
        finally:
            file.checkpoint.close()


def _make_report(file: LoraFile, matched: LoraMatch, place: LoraTargets, problem: str | None) -> LoraReport:
    parts = [part for parts in file.modules.values() for part in parts]
    products = [factors for factors in matched.factors.values() if FACTORS & factors.keys.keys()]
    preset = recognise_file(file.path, file.metadata, place.presets)
    has_pair = len(place.family.denoiser.transformers) == len(NOISE)
    return LoraReport(
        path=file.path,
        model=place.model,
        family=place.family.name,
        style=_style(file),
        ranks=tuple(sorted(_ranks(file))),
        scales=tuple(sorted({round(factors.scale, 6) for factors in products})),
        low_rank=sum(bool(FACTORS & each.keys()) for each in file.modules.values()),
        differences=sum(part in WHOLE for part in parts),
        biases=parts.count("bias"),
        matched_modules=matched.known_modules,
        modules=matched.modules,
        unmatched_keys=tuple(group_layers(matched.unknown_keys)),
        misfits=tuple(describe_misfits(matched)),
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
    noise = "" if lora.noise == "all" else f", for {lora.noise} noise"
    preset = recognise_file(lora.file.path, lora.file.metadata, presets)
    made_for = "" if preset is None else f", made for preset {preset}"
    return (
        f"lora {lora.file.path.name} at strength {lora.strength:g}: {lora.matched.known_modules} of "
        f"{lora.matched.modules} modules fit"
        f"{format_ranks(_ranks(lora.file))}{noise}{made_for}"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """ ", rank 32", or ", ranks 4 to 64"; empty without any."""
    found = sorted(set(ranks))
    if not found:
        return ""
    return f", rank {found[0]}" if len(found) == 1 else f", ranks {found[0]} to {found[-1]}"


def _ranks(file: LoraFile) -> set[int]:
    found = (
        find_rank({part: file.checkpoint.tensors[key].shape for part, key in each.items()})
        for each in file.modules.values()
    )
    return {rank for rank in found if rank is not None}


def _style(file: LoraFile) -> str:
    keys = list(file.checkpoint.tensors)
    if any(key.startswith(("lora_unet_", "lora_transformer_", "lycoris_")) for key in keys):
        return "kohya"
    if any(key.startswith(("diffusion_model.", "model.diffusion_model.")) for key in keys):
        return "ComfyUI"
    return "diffusers"
