"""Nodes and routes by which the tests look into a ComfyUI server: tensors to files, modules and numbers to JSON."""

import ctypes
import gc
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


class ProbeText:
    """Any text over a link of any type: what no list of choices has checked."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("*",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"value": ("STRING", {"default": ""})}}

    def give(self, value):
        return (value,)


class ProbeNumber:
    """A number over a link, "nan" and "inf" among them."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("FLOAT",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"value": ("STRING", {"default": "0"})}}

    def give(self, value):
        return (float(value),)


class ProbeConditioning:
    """What some other model's encoder would give."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {
            "required": {
                "shape": ("STRING", {"default": "1,512,4096"}),
                "entries": ("INT", {"default": 1, "min": 0}),
                "fill": ("STRING", {"default": "0"}),
            }
        }

    def give(self, shape, entries, fill):
        sizes = [int(size) for size in shape.split(",")]
        return ([[torch.full(sizes, float(fill)), {}] for _ in range(entries)],)


class ProbeLatent:
    """Latents of any shape."""

    CATEGORY = "test"
    FUNCTION = "give"
    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"shape": ("STRING", {"default": "1,16,5,8,8"}), "fill": ("STRING", {"default": "0"})}}

    def give(self, shape, fill):
        return ({"samples": torch.full([int(size) for size in shape.split(",")], float(fill))},)


@PromptServer.instance.routes.get("/probe")
async def probe(request):
    wanted = ("jax", "jaxlib", "torchax", "diffusers", "transformers", "comfy_tpu")
    found = {"modules": [name for name in wanted if name in sys.modules], "arrays": 0, "bytes": 0}
    found["package"] = getattr(sys.modules.get("comfy_tpu"), "__file__", None)
    if "jax" in sys.modules:  # not imported here: asking must not start it
        arrays = sys.modules["jax"].live_arrays()
        found |= {"arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays)}
    return web.json_response(found)


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@PromptServer.instance.routes.get("/probe/memory")
async def memory(request):
    """What the process holds, without what its allocator keeps free: Linux with glibc 2.33 or newer."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocInfo
    gc.collect()
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    found = {
        "live": info.uordblks + info.hblkhd,
        "host": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "mappings": Path("/proc/self/maps").read_bytes().count(b"\n"),
    }
    if "jax" in sys.modules:
        found["programs"] = len(sys.modules["jax"].devices()[0].client.live_executables())
    return web.json_response(found)


NODE_CLASS_MAPPINGS = {
    "ProbeKeep": ProbeKeep,
    "ProbeInteger": ProbeInteger,
    "ProbeText": ProbeText,
    "ProbeNumber": ProbeNumber,
    "ProbeConditioning": ProbeConditioning,
    "ProbeLatent": ProbeLatent,
}
