"""The model that is planned: its family and the configuration of its transformer, without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from comfy_tpu.config import DEMO_MODEL, GenerationSettings
from comfy_tpu.errors import InvalidValueError, config_errors
from comfy_tpu.families.card import Preset
from comfy_tpu.families.context import window_counts
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import find_family_card, find_published, load_family, model_cards
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES, ModelFiles
from comfy_tpu.pipeline.step import abstract_embeddings
from comfy_tpu.pipeline.step_work import count_step


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    name: str
    family: ModelFamily
    config: Mapping[str, Any]
    """The configuration of the transformer."""
    defaults: GenerationSettings
    vae: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The configuration of its VAE."""
    presets: Mapping[str, Preset] = dataclasses.field(default_factory=dict)

    @property
    def latent_channels(self) -> int:
        with config_errors(f"the config.json of the VAE of model={self.name}"):
            return self.family.vae.latent_channels(self.vae)

    def workload(self, settings: GenerationSettings, *, windows: int = 1) -> Workload:
        """`windows`: those in a call, for a long video."""
        with self._transformer_errors():
            return count_step(self.family, self.config, settings, self.latent_channels, windows=windows)

    def workloads(self, settings: GenerationSettings) -> list[Workload]:
        """The cost of one step with each number of windows in a call; of a video without windows, one."""
        counts = window_counts(self.family.card, settings)
        return [self.workload(settings, windows=windows) for windows in counts]

    def embedding_shapes(self, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
        with self._transformer_errors():
            return self.family.text.embedding_shapes(self.config, settings)

    def abstract_embeddings(self, settings: GenerationSettings) -> dict[str, jax.ShapeDtypeStruct]:
        with self._transformer_errors():
            return abstract_embeddings(self.family, self.config, settings)

    def _transformer_errors(self) -> AbstractContextManager[None]:
        return config_errors(f"the config.json of the transformer of model={self.name}")


def find_model(model: str, ignored_keys: Sequence[str] = ()) -> PlannedModel:
    """Finds a demo model, a directory, or a model whose configuration is built in, by its hub id or the id's last part.

    Nothing is downloaded, and of a directory only the JSON files are read.
    """
    if model in DEMO_DIRECTORIES or Path(model).is_dir():
        files = ModelFiles.open(model, to_run=False, ignored_keys=ignored_keys)
        family = files.family
        return PlannedModel(
            files.name,
            family,
            files.config(family.transformer),
            files.defaults,
            files.config(family.vae.component),
            files.presets,
        )
    if published := find_published(model):
        name, card = published
        vae = part_configs(find_family_card(card).package, name).get("vae", {})
        family = load_family(card.name)
        return PlannedModel(name, family, card.published[name], card.defaults_of(name), vae, card.presets)
    known = [name for card in model_cards() for name in card.published]
    raise InvalidValueError(
        f"MODEL {model} is neither a directory nor a model whose configuration is built in; give a directory in "
        "diffusers' layout, in which the JSON files are enough (hf download OWNER/NAME --include '*.json' --local-dir "
        f"DIR), {DEMO_MODEL}, or one of {', '.join(known)}"
    )
