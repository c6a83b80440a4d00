"""The names of Flux.2's own code for the modules of diffusers, for LoRA files."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.double_stream_names import COMMON_NAMES, SINGLE_NORMS, fused_rows
from comfy_tpu.families.shared.lora_names import rename_module

_ORIGINAL_NAMES = (
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj$", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_out$", r"single_blocks.\1.linear2"),
    *SINGLE_NORMS,
    (r"_modulation(_img|_txt)?\.linear$", r"_modulation\1.lin"),
    (r"\bff\.linear_in$", "img_mlp.0"),
    (r"\bff\.linear_out$", "img_mlp.2"),
    (r"\bff_context\.linear_in$", "txt_mlp.0"),
    (r"\bff_context\.linear_out$", "txt_mlp.2"),
    *COMMON_NAMES,
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    return {rename_module(module, _ORIGINAL_NAMES): fused_rows(module, shape)}
