"""The names of Z-Image's own code, which ComfyUI and kohya's trainers have too, for the modules of diffusers."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.lora_names import ALL, fused_qkv_rows, rename_module

_ORIGINAL_NAMES = (
    (r"^all_x_embedder\.2-1$", "x_embedder"),
    (r"^all_final_layer\.2-1\.", "final_layer."),
    (r"\battention\.to_[qkv]$", "attention.qkv"),
    (r"\battention\.to_out\.0$", "attention.out"),
    (r"\battention\.norm_([qk])$", r"attention.\1_norm"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    return {rename_module(module, _ORIGINAL_NAMES): fused_qkv_rows(module, shape) or ALL}
