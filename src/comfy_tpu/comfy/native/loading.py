"""A diffusion model from one file, without the copies in host memory that ComfyUI makes with --cpu.

ComfyUI with --cpu reads a bfloat16 file into float32 weights: twice the file, all of it touched. Here the model is
built without memory, its weights are the mapped file itself, and what our devices need is copied from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import safetensors
import torch

from comfy_tpu.errors import CheckpointError

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

SUFFIXES = (".safetensors", ".sft")


def load_diffusion_model(path: Path) -> ModelPatcher:
    """Loads a diffusion model like ComfyUI's own loader, in the file's dtype and without copying it."""
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"unet_name={path.name} is not a safetensors file; such files are pickles, and opening a pickle runs the "
            "code inside it: use the model's safetensors version"
        )
    try:
        tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    except (safetensors.SafetensorError, ValueError) as error:  # ComfyUI's words for a damaged header are a ValueError
        raise CheckpointError(f"unet_name={path.name} cannot be read: {error}; download it again") from error
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    tensors = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True) or tensors
    return _load_mapped(tensors, metadata) or _load_by_comfyui(path, tensors, metadata)


def _load_mapped(tensors: dict[str, torch.Tensor], metadata: Any) -> ModelPatcher | None:
    """The model whose weights are the given tensors; None for a model that ComfyUI must load itself (quantized weights,
    or a model that computes tables when it is built)."""
    if any(name.endswith(("scaled_fp8", ".scale_weight", ".weight_scale", ".comfy_quant")) for name in tensors):
        return None
    config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    if config is None or config.quant_config is not None:
        return None
    dtype = comfy.utils.weight_dtype(tensors)
    load_device = comfy.model_management.get_torch_device()
    config.set_inference_dtype(
        dtype, comfy.model_management.unet_manual_cast(dtype, load_device, config.supported_inference_dtypes)
    )
    model = config.get_model(tensors, "", device=torch.device("meta"))
    wanted = config.process_unet_state_dict(dict(tensors))
    missing, _ = model.diffusion_model.load_state_dict(wanted, strict=False, assign=True)
    if missing or any(part.is_meta for part in [*model.parameters(), *model.buffers()]):
        return None
    offload_device = comfy.model_management.unet_offload_device()
    model.device = offload_device
    return comfy.model_patcher.ModelPatcher(model, load_device=load_device, offload_device=offload_device)


def _unquantized_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype | None:
    """The dtype of the layers that a file does not quantize: ComfyUI rounds them to the dtype that it is given."""
    wide = {name: each for name, each in tensors.items() if each.is_floating_point() and each.itemsize > 1}
    return comfy.utils.weight_dtype(wide)


def _load_by_comfyui(path: Path, tensors: dict[str, torch.Tensor], metadata: Any) -> ModelPatcher:
    model = comfy.sd.load_diffusion_model_state_dict(
        tensors, model_options={"dtype": _unquantized_dtype(tensors)}, metadata=metadata
    )
    if model is None:
        raise CheckpointError(f"unet_name={path.name} holds no diffusion model that this ComfyUI knows")
    return model
