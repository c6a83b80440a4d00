"""The names of Flux's own code for the modules of diffusers, for LoRA files."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.double_stream_names import COMMON_NAMES, SINGLE_NORMS, fused_rows
from comfy_tpu.families.shared.lora_names import rename_module

_ORIGINAL_NAMES = (
    (r"^single_transformer_blocks\.(\d+)\.(?:attn\.to_[qkv]|proj_mlp)$", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.proj_out$", r"single_blocks.\1.linear2"),
    (r"^single_transformer_blocks\.(\d+)\.norm\.linear$", r"single_blocks.\1.modulation.lin"),
    *SINGLE_NORMS,
    (r"\bnorm1\.linear$", "img_mod.lin"),
    (r"\bnorm1_context\.linear$", "txt_mod.lin"),
    (r"\bff\.net\.0\.proj$", "img_mlp.0"),
    (r"\bff\.net\.2$", "img_mlp.2"),
    (r"\bff_context\.net\.0\.proj$", "txt_mlp.0"),
    (r"\bff_context\.net\.2$", "txt_mlp.2"),
    *COMMON_NAMES,
)
_XLABS_NAMES = (
    (r"^transformer_blocks\.(\d+)\.attn\.to_[qkv]$", r"double_blocks.\1.processor.qkv_lora1"),
    (r"^transformer_blocks\.(\d+)\.attn\.add_[qkv]_proj$", r"double_blocks.\1.processor.qkv_lora2"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0$", r"double_blocks.\1.processor.proj_lora1"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_add_out$", r"double_blocks.\1.processor.proj_lora2"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_[qkv]$", r"single_blocks.\1.processor.qkv_lora"),
    (r"^single_transformer_blocks\.(\d+)\.proj_out$", r"single_blocks.\1.processor.proj_lora"),
)
"""xlabs' names, for the attentions and what follows them."""


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    rows = fused_rows(module, shape)
    if module.endswith(".proj_mlp"):  # behind query, key and value
        rows = (slice(3 * shape[1], 3 * shape[1] + shape[0]),)
    names = {rename_module(module, _ORIGINAL_NAMES): rows}
    if (xlabs := rename_module(module, _XLABS_NAMES)) != module:
        names[xlabs] = rows
    return names
