"""The configurations of a model directory, checked before anything large is downloaded or read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import CheckpointError, config_errors
from comfy_tpu.families.card import SCHEDULER_FILE, ModelCard
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import find_family_card, find_model_card, find_published, load_family
from comfy_tpu.families.shared.config_checks import (
    check_absent,
    check_index,
    check_scheduler,
    check_tokenizer,
    clean_config,
)
from comfy_tpu.families.shared.published import known_configs

Config = Mapping[str, Any]
ReadConfig = Callable[[str], Config]
"""Reads a JSON file by its path in the model directory; empty where there is none."""


def check_repository(index: Config, read: ReadConfig, model: str, ignored: Collection[str] = ()) -> None:
    """Checks the configurations of a hub id that is not downloaded yet; see `check_configs`."""
    card = find_model_card(index, read("transformer/config.json"), read(SCHEDULER_FILE))
    family = load_family(card.name)
    check_index(index, [spec.name for spec in family.components], "model_index.json", ignored)
    check_configs(family, index, read, lambda name: name, ignored)
    check_published((model,), card, read, lambda name: name)


def check_configs(
    family: ModelFamily, index: Config, read: ReadConfig, place: Callable[[str], object], ignored: Collection[str]
) -> None:
    """Raises UnsupportedError for keys and classes that the installed libraries do not know, and CheckpointError for
    configurations of other classes. `place`: what messages call a file."""
    for spec in family.components:
        name = f"{spec.name}/config.json"
        class_name = _check_architecture(spec, read(name), index, family.name, str(place(name)))
        clean_config(read(name), class_name, str(place(name)), ignored)
    check_scheduler(read(SCHEDULER_FILE), str(place(SCHEDULER_FILE)), ignored)
    for encoder in family.text.encoders:
        name = f"{encoder.tokenizer}/tokenizer_config.json"
        check_tokenizer(read(name), str(place(name)))


def check_published(names: Collection[str], card: ModelCard, read: ReadConfig, place: Callable[[str], object]) -> None:
    """Raises CheckpointError where one of the names is a known hub id, and the files are not those of its model."""
    published = next(filter(None, map(find_published, names)), None)
    if published is None:
        return
    hub_id, own = published
    for part, facts in known_configs(find_family_card(own).package, hub_id).items():
        name = SCHEDULER_FILE if part == "scheduler" else f"{part}/config.json"
        if config := read(name):
            check_absent(config, facts, str(place(name)))
    if card is not own:
        raise CheckpointError(
            f"model={hub_id} has the configurations of {card.name}, expected those of {own.name}; download the model "
            "again",
            field="model",
        )


def find_class_name(config: Config, spec: ComponentSpec, index: Config) -> Any:
    """The class of a component: that of its configuration, else that of model_index.json."""
    component = index.get(spec.name)
    named = component[1:] if isinstance(component, list) else []
    return next(filter(None, (config.get("_class_name"), *(config.get("architectures") or []), *named)), None)


def _check_architecture(spec: ComponentSpec, config: Config, index: Config, family: str, path: str) -> str:
    with config_errors(path):
        found = find_class_name(config, spec, index)
    if found not in spec.classes:
        raise CheckpointError(
            f"{path} describes a {found}, expected {' or '.join(spec.classes)}; this is not a {family} {spec.name}"
        )
    return str(found)
