"""The names of Wan's own code for the modules of diffusers, for LoRA files."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.lora_names import ALL, rename_module

_ORIGINAL_NAMES = (
    (r"\battn1\.", "self_attn."),
    (r"\battn2\.", "cross_attn."),
    (r"\bto_([qkv])$", r"\1"),
    (r"\bto_out\.0$", "o"),
    (r"\badd_([kv])_proj$", r"\1_img"),
    (r"\bnorm_added_k$", "norm_k_img"),
    (r"\bffn\.net\.0\.proj$", "ffn.0"),
    (r"\bffn\.net\.2$", "ffn.2"),
    (r"^((?:vace_)?blocks\.\d+)\.norm2$", r"\1.norm3"),
    (r"^((?:vace_)?blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    (r"^(vace_blocks\.\d+)\.proj_out$", r"\1.after_proj"),
    (r"^vace_proj_in$", "vace_blocks.0.before_proj"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out$", "head.head"),
    (r"^condition_embedder\.time_proj$", "time_projection.1"),
    (r"^condition_embedder\.(text|time)_embedder\.linear_1$", r"\1_embedding.0"),
    (r"^condition_embedder\.(text|time)_embedder\.linear_2$", r"\1_embedding.2"),
    (r"^condition_embedder\.image_embedder\.norm1$", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2$", "img_emb.proj.4"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    """The name of a module of diffusers in Wan's own code, which ComfyUI and most trainers use too."""
    diffusers = {"vace_blocks.0.proj_in": ALL} if module == "vace_proj_in" else {}
    return {rename_module(module, _ORIGINAL_NAMES): ALL, **diffusers}
