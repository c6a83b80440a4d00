"""The download of an example workflow, from the parameters of the models that its nodes name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from comfy_tpu.hub.sizes import download_bytes, read_parameters
from tools.pages.sources import PageError

_NATIVE = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
_WORD_EMBEDDING = 256_384 * 4096
"""The parameters of UMT5's embedding, which stays in 16 bits in ComfyUI's fp8 file."""


def workflow_sizes(workflow: Mapping[str, Any]) -> list[str]:
    """The download of each model directory that a workflow names, and that of ComfyUI's own files together."""
    parameters = read_parameters()
    chosen = dict.fromkeys(value for node in workflow["nodes"] for value in _values(node) if value in parameters)
    sizes = [download_bytes(str(hub_id)) or 0 for hub_id in chosen]
    files = [model["name"] for node in workflow["nodes"] for model in node["properties"].get("models", ())]
    if files:
        sizes.append(sum(_file_bytes(name) for name in files))
    return [format_bytes(size) for size in sizes]


def format_bytes(count: int) -> str:
    gigabytes = count / 1e9
    return f"{gigabytes:.0f} GB" if gigabytes >= 9.95 else f"{gigabytes:.1f} GB"


def _file_bytes(name: str) -> int:
    parts = read_parameters()[_NATIVE]
    sizes = {
        "wan2.1_t2v_1.3B_fp16.safetensors": 2 * parts["transformer"],
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors": parts["text_encoder"] + _WORD_EMBEDDING,
        "wan_2.1_vae.safetensors": 2 * parts["vae"],
    }
    if name not in sizes:
        raise PageError(f"the size of {name} is unknown; add it to tools/pages/download_size.py")
    return sizes[name]


def _values(node: Mapping[str, Any]) -> Iterable[Any]:
    values = node.get("widgets_values") or ()
    return [value for value in (values.values() if isinstance(values, dict) else values) if isinstance(value, str)]
