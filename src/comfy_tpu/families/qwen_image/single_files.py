"""Qwen-Image in single files. Its authors' names, and those of ComfyUI's files, are diffusers' own."""

from __future__ import annotations

from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.shared.encoder_files import LANGUAGE_PREFIXES
from comfy_tpu.families.shared.vae_files import CAUSAL_VAE

SINGLE_FILES = {
    "transformer": PartFile(
        own="transformer_blocks.0.img_mod.1.weight",
        prefixes=("model.diffusion_model.",),
        required=("txt_norm.weight",),
        ignored=("__index_timestep_zero__",),  # how ComfyUI's files mark Qwen-Image-Edit-2511
    ),
    # Qwen2.5-VL: its language model alone has biases of queries. ComfyUI's file has its vision model beside it.
    "text_encoder": PartFile(own="layers.0.self_attn.q_proj.bias", prefixes=LANGUAGE_PREFIXES),
    "vae": CAUSAL_VAE,
}
EDIT_FILES = {
    **SINGLE_FILES,
    # Under whole names: the vision model stands beside the language model, or inside of it.
    "text_encoder": PartFile(
        own="model.layers.0.self_attn.q_proj.bias", original="model.language_model.layers.0.self_attn.q_proj.bias"
    ),
}
