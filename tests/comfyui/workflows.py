"""Example workflows as the frontend would queue them: saved format to prompt, and the demo model in every place."""

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from tests.comfyui.checkout import ROOT
from tests.comfyui.client import Prompt

EXAMPLES = ROOT / "example_workflows"
RED_CIRCLE = "a red circle moving right on a black background"
FRAMES = 17
STEPS = 20
DEMO_VAE = "demo_wan_vae.safetensors"
DEMO_TRANSFORMER = "demo_wan.safetensors"
_NOTES = ("MarkdownNote", "Note")
_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
_AFTER_GENERATE = ("fixed", "increment", "decrement", "randomize")


def load_example(name: str) -> dict[str, Any]:
    workflow: dict[str, Any] = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    return workflow


def to_prompt(workflow: Mapping[str, Any], object_info: Mapping[str, Any]) -> Prompt:
    """What the frontend sends for a workflow without muted or bypassed nodes."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt: Prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in _NOTES:
            continue
        if node.get("mode", 0) != 0:
            raise ValueError(f"node {node['id']} is muted or bypassed, which this conversion does not know")
        inputs = widget_values(node, object_info[node["type"]])
        for entry in node.get("inputs", ()):
            if entry.get("link") is not None:
                inputs[entry["name"]] = sources[entry["link"]]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def widget_values(node: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """The saved list has one value a widget, in the order of the schema, and one more behind a seed."""
    saved = node.get("widgets_values") or []
    if isinstance(saved, dict):
        return {name: value for name, value in saved.items() if name != "videopreview"}
    values = iter(saved)
    inputs: dict[str, Any] = {}
    for name, kind, options in _inputs(info):
        if not isinstance(kind, list) and kind not in _WIDGETS:
            continue
        # A node that has grown since the file was saved: the frontend takes the defaults of what is new.
        inputs[name] = next(values, options.get("default"))
        if options.get("control_after_generate"):
            following = next(values)
            if following not in _AFTER_GENERATE:
                raise ValueError(f"{node['type']}: {following!r} follows {name}, expected {', '.join(_AFTER_GENERATE)}")
    if rest := list(values):
        raise ValueError(f"{node['type']} has {len(rest)} values more than widgets: {rest}")
    return inputs


def _inputs(info: Mapping[str, Any]) -> Iterable[tuple[str, Any, Mapping[str, Any]]]:
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, ()):
            kind, *options = info["input"][group][name]
            yield name, kind, options[0] if options else {}


def with_demo_model(prompt: Prompt, *, text: str = RED_CIRCLE, steps: int = STEPS, seed: int = 2025) -> Prompt:
    """The same nodes and links, with the demo model everywhere. Sizes stay: the demo has its own, and ours must say so.

    ComfyUI's loaders cannot open a model of the demo's dimensions; those of the test pack take their place.
    """
    changed = copy.deepcopy(prompt)
    ours = {
        "prompt": text,
        "negative_prompt": "",
        "model_id": "demo",
        "num_frames": FRAMES,
        "num_inference_steps": steps,
        "guidance_scale": 3.0,
        "flow_shift": 3.0,
        "seed": seed,
    }
    for node in changed.values():
        inputs = node["inputs"]
        match node["class_type"]:
            case "Wan21TextEncoder" | "Wan21TPUSampler" | "Wan21TPUVAEDecoder" | "Wan21TPUPipeline":
                inputs |= {name: value for name, value in ours.items() if name in inputs}
            case "VAELoader":
                inputs["vae_name"] = DEMO_VAE
            case "UNETLoader":
                node |= {"class_type": "NativeDemoModel", "inputs": {"unet_name": DEMO_TRANSFORMER}}
            case "CLIPLoader":
                node |= {"class_type": "NativeDemoText", "inputs": {"directory": str(DEMO_DIRECTORY)}}
            case "EmptyHunyuanLatentVideo":
                inputs |= {"width": 64, "height": 64, "length": FRAMES, "batch_size": 1}
            case "ModelSamplingSD3":
                inputs["shift"] = 3.0
            case "KSampler":
                inputs |= {"steps": steps, "cfg": 3.0, "seed": seed}
    _set_native_texts(changed, text)
    return changed


def _set_native_texts(prompt: Prompt, text: str) -> None:
    samplers = [node["inputs"] for node in prompt.values() if node["class_type"] == "KSampler"]
    for inputs in samplers:
        for name, words in (("positive", text), ("negative", "")):
            source = prompt[inputs[name][0]]
            if source["class_type"] == "CLIPTextEncode":
                source["inputs"]["text"] = words


def nodes_of(prompt: Prompt, *classes: str) -> list[str]:
    """Ids of the nodes of these classes."""
    return [node_id for node_id, node in prompt.items() if node["class_type"] in classes]
