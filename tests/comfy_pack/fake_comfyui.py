"""ComfyUI as far as importing the pack goes: modules that record what nodes declare, and do nothing.

    python tests/comfy_pack/fake_comfyui.py PACK_DIRECTORY MODELS_DIRECTORY [bare]

loads the pack as ComfyUI does and prints one JSON object about it; `bare`: with no comfy_tpu installed. Options are
those of ComfyUI 0.7.0's comfy_api.latest, so that one which it does not know is an error here, too.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import logging
import os
import sys
import threading
import time
import types
import warnings
from pathlib import Path

INPUT_OPTIONS = {"display_name", "optional", "tooltip", "lazy", "extra_dict", "raw_link"}
WIDGET_OPTIONS = INPUT_OPTIONS | {"default", "socketless", "force_input"}
NUMBER_OPTIONS = WIDGET_OPTIONS | {"min", "max", "step", "display_mode"}
OPTIONS = {
    "INT": NUMBER_OPTIONS | {"control_after_generate"},
    "FLOAT": NUMBER_OPTIONS | {"round"},
    "BOOLEAN": WIDGET_OPTIONS | {"label_on", "label_off"},
    "STRING": WIDGET_OPTIONS | {"multiline", "placeholder", "dynamic_prompts"},
    "COMBO": WIDGET_OPTIONS | {"options", "control_after_generate", "upload", "image_folder", "remote"},
}
TYPES = {
    "Int": "INT",
    "Float": "FLOAT",
    "String": "STRING",
    "Combo": "COMBO",
    "Boolean": "BOOLEAN",
    "Conditioning": "CONDITIONING",
    "Latent": "LATENT",
    "Model": "MODEL",
    "Vae": "VAE",
    "Clip": "CLIP",
    "Image": "IMAGE",
    "Mask": "MASK",
    "Video": "VIDEO",
    "Audio": "AUDIO",
    "AnyType": "*",
}
HEAVY = ("jax", "jaxlib", "torchax", "diffusers", "transformers", "av", "PIL")


def _declarer(io_type):
    class Input:
        def __init__(self, id, **options):
            if unknown := set(options) - OPTIONS.get(io_type, INPUT_OPTIONS):
                raise TypeError(f"{io_type} input {id} was given {unknown}, which ComfyUI does not know")
            self.declared = {"id": id, "type": io_type, "optional": False, **options}

    class Output:
        def __init__(self, id=None, display_name=None, tooltip=None, is_output_list=False):
            self.declared = {"id": id, "name": display_name or id or io_type, "type": io_type, "tooltip": tooltip}

    return type(io_type, (), {"Input": Input, "Output": Output})


class Schema:
    def __init__(self, *, node_id, display_name, category, description, inputs, outputs, is_output_node=False):
        self.declared = {
            "id": node_id,
            "display_name": display_name,
            "category": category,
            "description": description,
            "is_output_node": is_output_node,
            "inputs": [each.declared for each in inputs],
            "outputs": [each.declared for each in outputs],
        }


class NodeOutput:
    def __init__(self, *results, ui=None):
        self.result = results


class _AnyAttribute(types.ModuleType):
    """Whatever is imported from it is a class that nobody has a use for until a node runs."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Routes:
    def __init__(self):
        self.added = []

    def __getattr__(self, method):
        return lambda path: lambda handler: self.added.append([method, path])


def install(models: Path) -> _Routes:
    routes = _Routes()

    def add(name, **content):
        module = _AnyAttribute(name)
        module.__dict__.update(content)
        module.__path__ = []
        sys.modules[name] = module
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
        return module

    declarers = {name: _declarer(io_type) for name, io_type in TYPES.items()}
    extension = type("ComfyExtension", (), {})
    add("comfy")
    for name in ("latent_formats", "model_management", "model_patcher", "patcher_extension", "utils"):
        add(f"comfy.{name}")
    add("comfy.cli_args", args=types.SimpleNamespace(listen="127.0.0.1"))
    add("comfy_api")
    inputs = add("comfy_api.io", Schema=Schema, NodeOutput=NodeOutput, Custom=_declarer, **declarers)
    add("comfy_api.latest", io=inputs, ComfyExtension=extension, ui=add("comfy_api.ui"))
    add("comfy_execution")
    add("comfy_execution.progress")
    add("comfy_execution.utils")
    add("latent_preview")
    add("protocol")
    add("aiohttp")
    add("aiohttp.web")
    add(
        "folder_paths",
        get_folder_paths=lambda kind: [str(models / kind)],
        get_filename_list=lambda kind: ["a_model.safetensors"],
        get_full_path=lambda kind, name: str(models / kind / name),
    )
    add("server", PromptServer=types.SimpleNamespace(instance=types.SimpleNamespace(routes=routes)))
    return routes


def state():
    """What importing must leave alone."""
    import torch

    return {
        "environment": dict(os.environ),
        "warnings": [str(entry) for entry in warnings.filters],
        "threads": threading.active_count(),
        "logging": [logging.getLogger().level, len(logging.getLogger().handlers), logging.root.manager.disable],
        "path": list(sys.path),
        "hooks": [str(sys.excepthook), len(sys.meta_path), len(sys.path_hooks)],
        "torch": [
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
            torch.is_grad_enabled(),
            torch.initial_seed(),
            torch.get_num_threads(),
            len(torch.overrides._get_current_function_mode_stack()),
        ],
    }


def load(directory: Path, models: Path):
    import torch  # ComfyUI has it before any node pack is loaded

    routes = install(models)
    before, loaded, start = state(), set(sys.modules), time.perf_counter()
    name = str(directory).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, directory / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
    asyncio.run(module.comfy_entrypoint())  # as for a second copy of the pack, which shares our modules
    schemas = [node.define_schema().declared for node in nodes]
    seconds = time.perf_counter() - start
    after = state()
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)  # as ComfyUI's
    logging.getLogger().addHandler(handler)
    logging.getLogger("comfy_tpu.pipeline.lora").warning("no place for %s", "\x1b[31m")
    logging.getLogger().removeHandler(handler)
    samplers = [node for node in nodes if node.__name__ in ("Wan21TPUSampler", "LTXVideoTPUSampler")]
    counts = (13, 16, 17, 21, 80, 81, 121, 125, 257, 265)
    fresh = {name.split(".")[0] for name in set(sys.modules) - loaded}
    return {
        "nodes": {schema["id"]: schema for schema in schemas},
        "order": [schema["id"] for schema in schemas],
        "web_directory": module.WEB_DIRECTORY,
        "legacy": [name for name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS") if hasattr(module, name)],
        "routes": routes.added,
        "frames": {
            sampler.__name__: {str(count): sampler.validate_inputs(num_frames=count) for count in counts}
            for sampler in samplers
        },
        "heavy": sorted(fresh & set(HEAVY)),
        "changed": {key: [before[key], after[key]] for key in before if before[key] != after[key]},
        "seconds": seconds,
        "logged": printed.getvalue(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    if sys.argv[3:] == ["bare"]:
        # Not by the directory: an editable installation leaves the pack's data files in one of that name beside torch.
        sys.path[:] = [entry for entry in sys.path if not (Path(entry) / "comfy_tpu" / "__init__.py").is_file()]
    sys.stdout.write("\n" + json.dumps(load(Path(sys.argv[1]), Path(sys.argv[2]))) + "\n")
