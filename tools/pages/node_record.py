"""The record of all nodes: new ones are added to it, and recorded ones stay as they are.

`tests/comfy_pack/test_golden_nodes.py` compares the nodes with it, so that saved workflows keep loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.pages.sources import Json

PATH = "tests/comfy_pack/golden_nodes.json"
_FREE = {"description", "tooltip"}
"""Texts, which may change."""


def read_record(root: Path) -> dict[str, Json]:
    record: dict[str, Json] = json.loads((root / PATH).read_text(encoding="utf-8"))
    return record


def extended_record(root: Path, nodes: Mapping[str, Json]) -> str:
    """The text of the record with the nodes that it lacks."""
    record = read_record(root)
    return format_record({**{node_id: without_texts(node) for node_id, node in nodes.items()}, **record})


def without_texts(value: Any) -> Any:
    if isinstance(value, list):
        return [without_texts(each) for each in value]
    if isinstance(value, dict):
        return {key: without_texts(each) for key, each in value.items() if key not in _FREE}
    return value


def format_record(record: Mapping[str, Json]) -> str:
    """A line for each field of a node, and one for each of its inputs and outputs."""
    return "{\n" + ",\n".join(f'  "{node_id}": {_format_node(record[node_id])}' for node_id in sorted(record)) + "\n}\n"


def _format_node(node: Json) -> str:
    fields = sorted(node, key=lambda name: (isinstance(node[name], list), name))
    return "{\n" + ",\n".join(f'    "{name}": {_format_field(node[name])}' for name in fields) + "\n  }"


def _format_field(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _dump(value)
    return "[\n" + ",\n".join(f"      {_dump(each)}" for each in value) + "\n    ]"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
