"""The model that is measured: a published one, a demo, a directory, or a small one of a family."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.bench.job import SMALL_MODEL
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.config import DEMO_MODEL, GenerationSettings
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.card import Config, FamilyCard, ModelCard
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.reference import Reference, load_references
from comfy_tpu.families.registry import family_cards, find_family_card, find_published, load_family, model_cards
from comfy_tpu.families.settings import parse_size
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES, ModelFiles
from comfy_tpu.pipeline.step import is_guided
from comfy_tpu.pipeline.step_work import count_step

_SMALL_TOKENS = 64
"""Text tokens of a small model, at most."""
_FEW_LAYERS = 2
_LAYER_COUNT = re.compile(r"^num_\w*layers$")


@dataclasses.dataclass(frozen=True)
class BenchModel:
    name: str
    """The hub id, "small:FAMILY", "demo" or the directory."""
    family: ModelFamily
    configs: Mapping[str, Config]
    """By component, as far as they are known."""
    defaults: GenerationSettings
    reference: Reference | None
    """None: diffusers cannot be compared with."""
    default_sizes: tuple[str, ...]

    @property
    def is_small(self) -> bool:
        """A random model of a family, or a demo: its times are those of starting, and its sizes may grow."""
        return self.name.partition(":")[0] in (SMALL_MODEL, *DEMO_DIRECTORIES)

    @property
    def latent_channels(self) -> int:
        return self.family.vae.latent_channels(self.configs.get(self.family.vae.component.name, {}))

    def config(self, spec: ComponentSpec) -> Config:
        # The second transformer of a model has the first one's configuration.
        name = self.family.transformer.name if spec in self.family.denoiser.transformers else spec.name
        if name not in self.configs:
            raise UnsupportedError(
                f"model={self.name}: the configuration of its {name} is not built in; give a model directory",
                field="model",
            )
        return self.configs[name]

    def find_reference(self) -> Reference:
        if self.reference is None:
            raise UnsupportedError(
                f"model={self.name}: its family has no reference.py, which says how diffusers runs it"
            )
        return self.reference

    def settings(self, size: str, **chosen: Any) -> GenerationSettings:
        # Whole, whatever their length: a forward is measured, not a way to make long videos.
        card = self.family.card
        whole = {} if card.limits.segment_overlaps else {"context": "none"}
        return parse_size(size, card, self.defaults, {**whole, **chosen})

    def forward_settings(self, size: str, batch: int) -> GenerationSettings:
        """Settings of a step whose batch is so many videos, each without a negative prompt."""
        settings = self.settings(size, num_videos=batch)
        off = self.family.card.guidance_off
        return dataclasses.replace(settings, guidance_scale=off) if is_guided(self.family, settings) else settings

    def workload(self, settings: GenerationSettings) -> Workload:
        return count_step(self.family, self.config(self.family.transformer), settings, self.latent_channels)

    def scaling_sizes(self) -> tuple[str, ...]:
        """About half to twice the tokens of the default size; of a small model, up to sixteen times."""
        settings, step = self.settings(self.default_sizes[0]), self.family.card.limits.size_multiple
        factors = (1, 2, 3, 4) if self.is_small else (0.5, 0.7, 1.0, 1.4)
        sides = (
            (max(1, round(side * factor / step)) * step for side in (settings.width, settings.height))
            for factor in factors
        )
        return tuple(dict.fromkeys(f"{width}x{height}x{settings.num_frames}" for width, height in sides))


def reduce_layers(config: Config) -> dict[str, Any]:
    """The configuration of the same transformer with two blocks of each kind."""
    return {
        name: min(value, _FEW_LAYERS) if isinstance(value, int) and _LAYER_COUNT.match(name) else value
        for name, value in config.items()
    }


def count_step_operations(work: Workload) -> tuple[float, float]:
    """Of a step's products and of its attention: a multiplication and an addition are two."""
    rows = {"tokens": work.tokens, "text": work.text_tokens, "both": work.tokens + work.text_tokens}
    linear = sum(
        2.0 * count * rows.get(each.rows, each.sample_rows) * each.nbytes / each.itemsize
        for count, each in work.matrices
        if each.used
    )
    attention = sum(4.0 * stack.layers * work.hidden * _pairs(work.for_stack(stack)) for stack in work.stacks)
    return work.batch * linear, work.batch * attention


def _pairs(work: Workload) -> int:
    """Pairs of query and key in a block."""
    return work.sequence**2 + (work.tokens * work.text_tokens if work.text == "keys" else 0)


def default_hub_id() -> str:
    """The hub id that "auto" stands for on an accelerator."""
    return family_cards()[0].node_sets[0].hub_models[0]


def find_bench_model(model: str) -> BenchModel:
    """Nothing is downloaded; of a directory only the JSON files are read."""
    kind, colon, name = model.partition(":")
    if kind == SMALL_MODEL:
        families = {card.name: card for card in family_cards()}
        if colon and name not in families:
            raise InvalidValueError(f"model={model} names no family; choose from {', '.join(families)}", field="model")
        return _small_model(families[name] if colon else family_cards()[0])
    if model in DEMO_DIRECTORIES or Path(model).is_dir():
        return _model_directory(model)
    if published := find_published(model):
        return _published_model(*published)
    known = ", ".join(hub_id for card in model_cards() for hub_id in card.published)
    raise InvalidValueError(
        f"model={model} is unknown; choose {SMALL_MODEL}, {SMALL_MODEL}:FAMILY, {DEMO_MODEL}, a model directory, or "
        f"one of {known}",
        field="model",
    )


def _published_model(hub_id: str, card: ModelCard) -> BenchModel:
    family, reference = load_family(card.name), load_references(find_family_card(card))[0].get(hub_id)
    configs = {
        **part_configs(find_family_card(card).package, hub_id),
        family.transformer.name: card.published[hub_id],
    }
    defaults = card.defaults_of(hub_id)
    sizes = [defaults] if card.makes_images else [parse_size(name, card, defaults) for name in card.sizes]
    ordered = sorted(sizes or [defaults], key=lambda size: size.height * size.width)
    names = tuple(f"{size.width}x{size.height}x{size.num_frames}" for size in ordered)
    return BenchModel(hub_id, family, configs, defaults, reference, names)


def _small_model(family: FamilyCard) -> BenchModel:
    """The family's first published model with the values of its `SMALL`; without one, with few layers."""
    first = next((hub_id, card) for card in family.models for hub_id in card.published)
    model, changed = _published_model(*first), load_references(family)[1]
    transformer = model.family.transformer.name
    configs = {name: {**config, **changed.get(name, {})} for name, config in model.configs.items()}
    if transformer not in changed:
        configs[transformer] = reduce_layers(configs[transformer])
    limits, scale = model.family.card.limits, model.family.card.temporal_scale
    step = max(limits.size_multiple, limits.size_min)
    # Three latent frames: every program of a VAE that decodes frame by frame.
    frames = 1 if model.family.card.makes_images else 2 * scale + 1
    tokens = min(model.defaults.max_sequence_length, max(_SMALL_TOKENS, limits.tokens_multiple))
    defaults = dataclasses.replace(model.defaults, max_sequence_length=tokens)
    size = f"{6 * step}x{4 * step}x{frames}"
    return dataclasses.replace(
        model, name=f"{SMALL_MODEL}:{family.name}", configs=configs, defaults=defaults, default_sizes=(size,)
    )


def _model_directory(model: str) -> BenchModel:
    files = ModelFiles.open(model, to_run=False)
    family, defaults = files.family, files.defaults
    references = load_references(find_family_card(family.card))[0]
    reference = next((references[hub_id] for hub_id in family.card.published if hub_id in references), None)
    configs = {spec.name: files.config(spec) for spec in family.components}
    size = f"{defaults.width}x{defaults.height}x{defaults.num_frames}"
    return BenchModel(files.name, family, configs, defaults, reference, (size,))
