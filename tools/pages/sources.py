"""The sources of generated pages: the nodes' schemas, the hand-written texts, and the example workflows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.comfy_pack.loading import load_pack

LANGUAGES = ("en", "zh")
Json = Mapping[str, Any]


class PageError(Exception):
    """A text is missing or malformed; the message is one sentence with the file to edit."""


def read_nodes() -> dict[str, Json]:
    """Schemas by node id, as ComfyUI sees them with no local model."""
    with tempfile.TemporaryDirectory() as models:
        nodes: dict[str, Json] = load_pack(models)["nodes"]
    return nodes


def read_texts(root: Path, language: str, name: str) -> Json:
    """`name`: help.json or nodeDefs.json."""
    path = root / "locales" / language / name
    try:
        content: Json = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PageError(f"{path.relative_to(root)} cannot be read: {error}; correct it, then run make pages") from error
    return content


def read_templates(root: Path) -> dict[str, list[str]]:
    """Node id -> the example workflows that have the node, in the order of their names."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "example_workflows").glob("*.json")):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        for node_id in {node["type"] for node in workflow["nodes"]}:
            found.setdefault(node_id, []).append(path.stem)
    return found
