"""A workflow in the form in which ComfyUI's API takes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.json_input import read_json

Workflow = Mapping[str, Mapping[str, Any]]
"""Nodes by id: {"3": {"class_type": "KSampler", "inputs": {…}}}."""

EXPORT = "open it in ComfyUI and choose Workflow > Export (API)"
"""How the form is made of a workflow that was saved."""


def read_workflow(path: Path) -> Workflow:
    """Raises InvalidValueError for a file that ComfyUI's API would not take."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise InvalidValueError(
            f"workflow={path} does not exist; give a file in ComfyUI's API form", field="workflow"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"workflow={path} cannot be read ({error}); {EXPORT}", field="workflow") from error
    if isinstance(content, dict) and isinstance(content.get("nodes"), list):
        raise InvalidValueError(
            f"workflow={path} is a workflow as the canvas saves it, and the API takes another form; {EXPORT}",
            field="workflow",
        )
    if isinstance(content, dict) and isinstance(content.get("prompt"), dict):  # as it is posted
        content = content["prompt"]
    nodes = content.items() if isinstance(content, dict) else ()
    if not nodes or not all(isinstance(node, dict) and isinstance(node.get("class_type"), str) for _, node in nodes):
        raise InvalidValueError(
            f"workflow={path} holds no nodes with a class_type each, which is ComfyUI's API form; {EXPORT}",
            field="workflow",
        )
    return dict(nodes)
