"""Nodes and a route by which the tests look into a ComfyUI server: tensors to files, modules and numbers to JSON."""

import sys
from pathlib import Path

import folder_paths
import torch
from aiohttp import web
from server import PromptServer


class ProbeKeep:
    """Writes whatever it is given as `torch.save` does, bit by bit, and passes it on."""

    CATEGORY = "test"
    FUNCTION = "keep"
    OUTPUT_NODE = True
    RETURN_TYPES = ("*",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"value": ("*",), "name": ("STRING", {"default": "value"})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):  # noqa: N802
        return True

    def keep(self, value, name):
        file = Path(folder_paths.get_output_directory()) / f"{name}.pt"
        torch.save(value, file)
        return {"ui": {"kept": [file.name]}, "result": (value,)}


class ProbeInteger:
    """A whole number that comes over a link, so that no widget's range holds it."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("INT",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"value": ("INT", {"default": 0, "min": -(2**63), "max": 2**63})}}

    def give(self, value):
        return (value,)


class ProbeConditioning:
    """What some other model's encoder would give."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"tokens": ("INT", {"default": 512}), "features": ("INT", {"default": 4096})}}

    def give(self, tokens, features):
        return ([[torch.zeros(1, tokens, features), {}]],)


class ProbeLatent:
    """Latents of any shape."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"shape": ("STRING", {"default": "1,16,5,8,8"}), "fill": ("FLOAT", {"default": 0.0})}}

    def give(self, shape, fill):
        return ({"samples": torch.full([int(size) for size in shape.split(",")], float(fill))},)


@PromptServer.instance.routes.get("/probe")
async def probe(request):
    wanted = ("jax", "jaxlib", "torchax", "diffusers", "transformers", "comfy_tpu")
    return web.json_response({"modules": [name for name in wanted if name in sys.modules]})


NODE_CLASS_MAPPINGS = {
    "ProbeKeep": ProbeKeep,
    "ProbeInteger": ProbeInteger,
    "ProbeConditioning": ProbeConditioning,
    "ProbeLatent": ProbeLatent,
}
