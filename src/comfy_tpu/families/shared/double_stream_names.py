"""The names of transformers with double and single blocks in their authors' code, ComfyUI and kohya's trainers."""

from __future__ import annotations

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.lora_names import ALL, fused_qkv_rows, swap_halves

SINGLE_NORMS = (
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q$", r"single_blocks.\1.norm.query_norm.scale"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k$", r"single_blocks.\1.norm.key_norm.scale"),
)
COMMON_NAMES = (
    (r"^transformer_blocks\.", "double_blocks."),
    (r"\battn\.to_[qkv]$", "img_attn.qkv"),
    (r"\battn\.add_[qkv]_proj$", "txt_attn.qkv"),
    (r"\battn\.to_out\.0$", "img_attn.proj"),
    (r"\battn\.to_add_out$", "txt_attn.proj"),
    (r"\battn\.norm_q$", "img_attn.norm.query_norm.scale"),
    (r"\battn\.norm_k$", "img_attn.norm.key_norm.scale"),
    (r"\battn\.norm_added_q$", "txt_attn.norm.query_norm.scale"),
    (r"\battn\.norm_added_k$", "txt_attn.norm.key_norm.scale"),
    (r"^time_\w+_embed\.timestep_embedder\.", "time_in."),
    (r"^time_\w+_embed\.guidance_embedder\.", "guidance_in."),
    (r"^time_text_embed\.text_embedder\.", "vector_in."),
    (r"\blinear_1$", "in_layer"),
    (r"\blinear_2$", "out_layer"),
    (r"^x_embedder$", "img_in"),
    (r"^context_embedder$", "txt_in"),
    (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
    (r"^proj_out$", "final_layer.linear"),
)


def fused_rows(module: str, shape: tuple[int, ...]) -> Rows:
    if module == "norm_out.linear":
        return swap_halves(shape)
    return fused_qkv_rows(module, shape) or ALL
