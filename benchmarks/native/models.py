"""Models of ComfyUI at their published sizes, with random weights: ComfyUI's own classes, and what a prompt gives them.

Import it where ComfyUI can be imported.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import comfy.model_patcher
import comfy.supported_models
import torch

Conditioning = list[list[Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    title: str
    model_class: str
    """In comfy.supported_models."""
    config: dict[str, Any]
    latent: tuple[int, ...]
    """[channels, …] of 1024 × 1024 pixels."""
    tokens: int
    features: int
    """Of the prompt."""
    pooled: int = 0
    """Features of the prompt as a whole; 0: the model reads none."""

    def build(self, device: torch.device, dtype: torch.dtype) -> comfy.model_patcher.ModelPatcher:
        config = getattr(comfy.supported_models, self.model_class)(dict(self.config))
        config.set_inference_dtype(dtype, None)
        with device:
            model = config.get_model({}, "", device=device)
        _fill(model.diffusion_model, device, dtype)
        model.eval()
        return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))

    def prompt(self, seed: int) -> Conditioning:
        generator = torch.Generator().manual_seed(seed)
        extra: dict[str, Any] = {"width": 1024, "height": 1024}
        if self.pooled:
            extra["pooled_output"] = torch.randn(1, self.pooled, generator=generator)
        return [[torch.randn(1, self.tokens, self.features, generator=generator), extra]]


def _fill(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Random weights under which activations keep their size, and norms that change nothing."""
    generator = torch.Generator(device).manual_seed(0)
    module.to(device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                spread = 1 / math.sqrt(math.prod(parameter.shape[1:]))
                parameter.normal_(0, spread, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


_SDXL = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "context_dim": 2048,
    "adm_in_channels": 2816,
    "use_linear_in_transformer": True,
    "use_spatial_transformer": True,
    "legacy": False,
    "num_classes": "sequential",
    "num_head_channels": 64,
    "num_heads": -1,
    "use_temporal_attention": False,
}
_SD35_LARGE = {
    "in_channels": 16,
    "patch_size": 2,
    "out_channels": 16,
    "depth": 38,
    "input_size": None,
    "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}},
    "num_patches": 36864,
    "pos_embed_max_size": 192,
    "qk_norm": "rms",
    "pos_embed_scaling_factor": None,
}
_QWEN_IMAGE = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 60,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 3584,
}

MODELS = {
    "sdxl": Model("SDXL base", "SDXL", _SDXL, (4, 128, 128), 77, 2048, 1280),
    "sd3.5-large": Model("SD3.5 large", "SD3", _SD35_LARGE, (16, 128, 128), 154, 4096, 2048),
    "qwen-image": Model("Qwen-Image", "QwenImage", _QWEN_IMAGE, (16, 1, 128, 128), 64, 3584),
}
"""By name."""

_FEW_LAYERS: dict[str, dict[str, Any]] = {
    "sdxl": {"model_channels": 32, "num_head_channels": 16},
    "sd3.5-large": {
        "depth": 2,
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}},
    },
    "qwen-image": {"num_layers": 2, "num_attention_heads": 2},
}


def find_model(name: str, *, is_small: bool = False) -> Model:
    """`is_small`: a small one of the same class and a small image, which a CPU can run."""
    model = MODELS[name]
    if not is_small:
        return model
    small = tuple(min(side, 16) for side in model.latent)
    return dataclasses.replace(model, config={**model.config, **_FEW_LAYERS[name]}, latent=small)
