"""All generated files, as texts by their paths."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from comfy_tpu.families import registry
from comfy_tpu.families.card import FamilyCard
from tools.pages import defaults_page
from tools.pages.facts import KINDS, Facts
from tools.pages.help_page import help_page
from tools.pages.model_table import model_table, replace_table
from tools.pages.node_record import PATH, extended_record
from tools.pages.range_table import range_table, replace_ranges
from tools.pages.sources import LANGUAGES, Json, read_templates, read_texts
from tools.pages.version_row import replace_versions

TABLES = {
    "en": ("README.md", "docs/comfyui.md"),
    "zh": ("README.zh-CN.md", "docs/comfyui.zh-CN.md"),
}


README = {"en": "README.md", "zh": "README.zh-CN.md"}
GUIDE = {"en": "docs/comfyui.md", "zh": "docs/comfyui.zh-CN.md"}


def generated_files(
    root: Path, cards: Sequence[FamilyCard], nodes: Mapping[str, Json], languages: Sequence[str] = LANGUAGES
) -> Iterator[tuple[str, str]]:
    """(path below the root, text) of every generated file; raises PageError at the first text that is missing."""
    templates = read_templates(root)
    packages = {card.package for card in cards}
    others = [card for card in registry.family_cards() if card.package not in packages]
    foreign = {node_set.key for card in others for node_set in card.node_sets}
    nodes = {node_id: node for node_id, node in nodes.items() if not _belongs_to(node_id, foreign)}
    for language in languages:
        texts = read_texts(root, language, "help.json")
        definitions = english_definitions(nodes) if language == "en" else read_texts(root, language, "nodeDefs.json")
        if language == "en":
            yield "locales/en/nodeDefs.json", json.dumps(definitions, indent=2, ensure_ascii=False) + "\n"
            yield PATH, extended_record(root, nodes)
        built_in = [card for card in cards if is_built_in(card)]
        yield defaults_page.PATHS[language], defaults_page.defaults_page(built_in, language)
        for node_set in (node_set for card in cards for node_set in card.node_sets):
            facts = Facts(node_set, texts, definitions, language)
            for kind in KINDS:
                node_id = f"{node_set.key}{kind}"
                if node_id in nodes:
                    page = help_page(facts, kind, nodes[node_id], templates.get(node_id, ()))
                    yield f"web/docs/{node_id}/{language}.md", page
                    if language == "en":  # the frontend shows it in every other language
                        yield f"web/docs/{node_id}.md", page
        table = model_table(cards, texts)
        for name in TABLES[language]:
            page = replace_table((root / name).read_text(encoding="utf-8"), name, table)
            if name == README[language]:
                page = replace_versions(page, name, texts)
            if name == GUIDE[language]:
                page = replace_ranges(page, name, range_table(cards, nodes, texts))
            yield name, page


def _belongs_to(node_id: str, keys: Collection[str]) -> bool:
    return any(node_id == f"{key}{kind}" for key in keys for kind in KINDS)


def english_definitions(nodes: Mapping[str, Json]) -> dict[str, Json]:
    """Names and tooltips of the nodes, in the form that ComfyUI's frontend reads."""
    return {
        node_id: {
            "display_name": node["display_name"],
            "description": node["description"],
            "inputs": dict(_input_texts(node["inputs"])),
            "outputs": {
                str(number): {"name": made["name"], "tooltip": made["tooltip"]}
                for number, made in enumerate(node["outputs"])
            },
        }
        for node_id, node in nodes.items()
    }


def _input_texts(inputs: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    for given in inputs:
        yield given["id"], {"name": given["id"], "tooltip": given["tooltip"]}
        if given["id"] == "seed":  # the frontend puts a widget behind it
            yield "control_after_generate", {"name": "control after generate"}


def is_stale(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


def built_in_cards() -> list[FamilyCard]:
    """The families of this repository: an installed one brings pages of its own."""
    return [card for card in registry.family_cards() if is_built_in(card)]


def is_built_in(card: FamilyCard) -> bool:
    return card.package in registry.BUILT_IN
