"""What Flux's own code calls the modules of diffusers, in both generations.

ComfyUI and kohya's trainers do as it does.
"""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.lora_names import ALL, Rows, renamed, rows_of_fused, swapped_halves

_SINGLE = (
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q$", r"single_blocks.\1.norm.query_norm.scale"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k$", r"single_blocks.\1.norm.key_norm.scale"),
)
_BOTH = (
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
_FLUX = (
    (r"^single_transformer_blocks\.(\d+)\.(?:attn\.to_[qkv]|proj_mlp)$", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.proj_out$", r"single_blocks.\1.linear2"),
    (r"^single_transformer_blocks\.(\d+)\.norm\.linear$", r"single_blocks.\1.modulation.lin"),
    *_SINGLE,
    (r"\bnorm1\.linear$", "img_mod.lin"),
    (r"\bnorm1_context\.linear$", "txt_mod.lin"),
    (r"\bff\.net\.0\.proj$", "img_mlp.0"),
    (r"\bff\.net\.2$", "img_mlp.2"),
    (r"\bff_context\.net\.0\.proj$", "txt_mlp.0"),
    (r"\bff_context\.net\.2$", "txt_mlp.2"),
    *_BOTH,
)
_FLUX2 = (
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj$", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_out$", r"single_blocks.\1.linear2"),
    *_SINGLE,
    (r"_modulation(_img|_txt)?\.linear$", r"_modulation\1.lin"),
    (r"\bff\.linear_in$", "img_mlp.0"),
    (r"\bff\.linear_out$", "img_mlp.2"),
    (r"\bff_context\.linear_in$", "txt_mlp.0"),
    (r"\bff_context\.linear_out$", "txt_mlp.2"),
    *_BOTH,
)


def flux_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    rows = _rows(module, shape)
    if module.endswith(".proj_mlp"):  # behind query, key and value
        rows = (slice(3 * shape[1], 3 * shape[1] + shape[0]),)
    return {renamed(module, _FLUX): rows}


def flux2_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    return {renamed(module, _FLUX2): _rows(module, shape)}


def _rows(module: str, shape: tuple[int, ...]) -> Rows:
    if module == "norm_out.linear":
        return swapped_halves(shape)
    return rows_of_fused(module, shape) or ALL
