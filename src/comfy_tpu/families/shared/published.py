"""The configurations of a family's published models, from the JSON files in its directory `published`.

`tools/published_facts.py` writes them. Neither torch nor jax is imported.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any

from comfy_tpu.json_input import parse_json

Config = Mapping[str, Any]

_DIFFUSERS = parse_json(importlib.resources.files(__package__).joinpath("diffusers_facts.json").read_bytes())

NO_EFFECT: Mapping[tuple[str, str], str] = {
    (owner, name): reason for owner, keys in _DIFFUSERS["keys"].items() for name, reason in keys.items()
}
"""(class, key) of published configurations that released versions of diffusers do not know -> why it has no effect.

These are all: no other key of these classes and their schedulers disappeared between diffusers 0.32 and 0.42.
"""
SUBPACKAGES: tuple[str, ...] = tuple(_DIFFUSERS["modules"])
"""Modules with classes of configurations that `diffusers` itself does not export."""


@functools.cache
def _read_facts(package: str, hub_id: str) -> Mapping[str, Any]:
    file = importlib.resources.files(package) / "published" / f"{hub_id.replace('/', '__')}.json"
    return parse_json(file.read_bytes()) if file.is_file() else {}


def read_published(package: str, hub_id: str) -> Mapping[str, Config]:
    """The configurations of a published model by the names of its parts, "model_index" and "scheduler" among them;
    empty for a model of another package."""
    return {part: facts["config"] for part, facts in _read_facts(package, hub_id).items()}


def known_configs(package: str, hub_id: str) -> dict[str, Config]:
    """Those of `read_published` that are of the model's own files, and take the place of none that could not be had."""
    return {
        part: facts["config"] for part, facts in _read_facts(package, hub_id).items() if facts["source"] != "unknown"
    }


def part_configs(package: str, hub_id: str) -> dict[str, Config]:
    """The configurations that modules are built from, by part: without keys that have no effect."""
    return {part: _clean(config) for part, config in read_published(package, hub_id).items() if part != "model_index"}


def _clean(config: Config) -> Config:
    owner = config.get("_class_name")
    return {name: value for name, value in config.items() if name[0] != "_" and (owner, name) not in NO_EFFECT}


def transformer_configs(package: str, *hub_ids: str) -> dict[str, Config]:
    """The configurations of transformers by hub id, as cards have them."""
    return {hub_id: part_configs(package, hub_id)["transformer"] for hub_id in hub_ids}
