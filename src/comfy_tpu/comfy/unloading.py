"""Makes ComfyUI's Unload and Free evict our weights from the devices.

ComfyUI unloads the models in its own list. One empty placeholder in that list, added by ComfyUI's own function and with
ComfyUI's own callback, represents all of our weights: nothing of ComfyUI is replaced.
"""

from __future__ import annotations

import functools
import gc

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP


class DeviceWeights(torch.nn.Module):
    """The placeholder. It has no weights; ComfyUI's log shows its class name."""


@functools.cache
def _make_placeholder() -> ModelPatcher:
    from comfy_tpu.compiler.residency import shared_residency

    def release(patcher: ModelPatcher, unpatch_all: bool = True) -> None:
        shared_residency().clear()
        gc.collect()  # what an interrupted run left in a traceback's frames

    device = comfy.model_management.get_torch_device()
    patcher = ModelPatcher(DeviceWeights(), load_device=device, offload_device=torch.device("cpu"))
    patcher.add_callback(CallbacksMP.ON_DETACH, release)
    return patcher


def register_with_comfyui() -> None:
    """Adds the placeholder to ComfyUI's list of loaded models, if it is not there. Called before weights are loaded."""
    # Only where it is not on the list yet: loading a model anew begins with detaching it.
    if _make_placeholder() not in comfy.model_management.loaded_models():
        comfy.model_management.load_models_gpu([_make_placeholder()])
