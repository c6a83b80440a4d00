"""ComfyUI's Unload and Free reach what is on our devices.

ComfyUI unloads the models in its own list. One empty stand-in on that list, put there by ComfyUI's own function and
with ComfyUI's own callback, stands for everything of ours: nothing of ComfyUI is replaced.
"""

from __future__ import annotations

import functools
import gc

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP


class DeviceWeights(torch.nn.Module):
    """The stand-in. It has no weights; its name is what ComfyUI's log shows."""


@functools.cache
def _stand_in() -> ModelPatcher:
    from comfy_tpu.compiler.residency import shared_residency

    def release(patcher: ModelPatcher, unpatch_all: bool = True) -> None:
        shared_residency().clear()
        gc.collect()  # what an interrupted run left in a traceback's frames

    device = comfy.model_management.get_torch_device()
    patcher = ModelPatcher(DeviceWeights(), load_device=device, offload_device=torch.device("cpu"))
    patcher.add_callback(CallbacksMP.ON_DETACH, release)
    return patcher


def register_with_comfyui() -> None:
    """Before our weights go to the devices."""
    # Only where it is not on the list yet: loading a model anew begins with detaching it.
    if _stand_in() not in comfy.model_management.loaded_models():
        comfy.model_management.load_models_gpu([_stand_in()])
