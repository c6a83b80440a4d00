"""The names of HunyuanVideo's own code, and of ComfyUI, for the modules of diffusers, for LoRA files."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.lora_names import ALL, fused_qkv_rows, rename_module, swap_halves

_ORIGINAL_NAMES = (
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_out\.0$", r"txt_in.\1.self_attn_proj"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_[qkv]$", r"txt_in.\1.self_attn_qkv"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.ff\.net\.0\.proj$", r"txt_in.\1.mlp.fc1"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.ff\.net\.2$", r"txt_in.\1.mlp.fc2"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.norm_out\.linear$", r"txt_in.\1.adaLN_modulation.1"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.", r"txt_in.\1."),
    (r"^txt_in\.(\d+)\.", r"txt_in.individual_token_refiner.blocks.\1."),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1$", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2$", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in$", "txt_in.input_embedder"),
    (r"^context_embedder_2\.norm$", "byt5_in.layernorm"),
    (r"^context_embedder_2\.linear_(\d)$", r"byt5_in.fc\1"),
    (r"^image_embedder\.norm_in$", "vision_in.proj.0"),
    (r"^image_embedder\.linear_1$", "vision_in.proj.1"),
    (r"^image_embedder\.linear_2$", "vision_in.proj.3"),
    (r"^image_embedder\.norm_out$", "vision_in.proj.4"),
    (r"^time_embed\.timestep_embedder\.linear_1$", "time_in.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2$", "time_in.mlp.2"),
    (r"^x_embedder\.proj$", "img_in.proj"),
    (r"^cond_type_embed$", "cond_type_embedding"),
    (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
    (r"^proj_out$", "final_layer.linear"),
    (r"\bnorm1\.linear$", "img_mod.linear"),
    (r"\bnorm1_context\.linear$", "txt_mod.linear"),
    (r"\battn\.to_([qkv])$", r"img_attn_\1"),
    (r"\battn\.add_([qkv])_proj$", r"txt_attn_\1"),
    (r"\battn\.to_out\.0$", "img_attn_proj"),
    (r"\battn\.to_add_out$", "txt_attn_proj"),
    (r"\battn\.norm_([qk])$", r"img_attn_\1_norm"),
    (r"\battn\.norm_added_([qk])$", r"txt_attn_\1_norm"),
    (r"\bff\.net\.0\.proj$", "img_mlp.fc1"),
    (r"\bff\.net\.2$", "img_mlp.fc2"),
    (r"\bff_context\.net\.0\.proj$", "txt_mlp.fc1"),
    (r"\bff_context\.net\.2$", "txt_mlp.fc2"),
)
_COMFYUI_NAMES = (
    (r"_attn_[qkv]$", "_attn_qkv"),
    (r"_attn_(qkv|proj)$", r"_attn.\1"),
    (r"_attn_q_norm$", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm$", "_attn.norm.key_norm.scale"),
    (r"_mod\.linear$", "_mod.lin"),
    (r"mlp\.fc1$", "mlp.0"),
    (r"mlp\.fc2$", "mlp.2"),
    (r"_(in|embedder)\.(?:mlp\.0|linear_1)$", r"_\1.in_layer"),
    (r"_(in|embedder)\.(?:mlp\.2|linear_2)$", r"_\1.out_layer"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    """The names of a module of diffusers in the authors' code and in ComfyUI.

    The authors' names are those that diffusers' conversion of their checkpoints reads. Query, key and value of a block
    are three modules there, and one in ComfyUI; trainers that came from HunyuanVideo write that one as `_attn_qkv`.
    """
    original, fused = rename_module(module, _ORIGINAL_NAMES), fused_qkv_rows(module, shape)
    comfyui = rename_module(original, _COMFYUI_NAMES)
    if module == "norm_out.linear":
        return {original: swap_halves(shape)}
    if fused is None:
        return {original: ALL, comfyui: ALL}
    one_module = comfyui.replace("_attn.qkv", "_attn_qkv")
    return {original: fused if original == one_module else ALL, comfyui: fused, one_module: fused}
