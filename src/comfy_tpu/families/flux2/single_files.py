"""Flux.2 in single files, under the names of its authors, which ComfyUI's files have too."""

from __future__ import annotations

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.encoder_files import LANGUAGE_PREFIXES, QWEN3, rename_tensors

_VAE_NAMES = {r"^encoder\.quant_conv\.": "quant_conv.", r"^decoder\.post_quant_conv\.": "post_quant_conv."}
"""The authors have these two inside of encoder and decoder; ComfyUI writes them outside."""


def _convert_transformer(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_flux2_transformer_checkpoint_to_diffusers(tensors)
    return converted


def _convert_vae(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    statistics = {name: tensor for name, tensor in tensors.items() if name.startswith("bn.")}
    converted: Tensors = convert_ldm_vae_checkpoint(rename_tensors(tensors, _VAE_NAMES), config)
    return converted | statistics


_COMMON = {
    "transformer": PartFile(
        own="double_stream_modulation_img.linear.weight",
        original="double_stream_modulation_img.lin.weight",
        convert=_convert_transformer,
        prefixes=("model.diffusion_model.",),
    ),
    "vae": PartFile(
        own="decoder.mid_block.attentions.0.group_norm.weight",
        original="decoder.mid.attn_1.norm.weight",
        convert=_convert_vae,
        prefixes=("vae.", "first_stage_model."),
        required=("bn.running_mean",),
    ),
}
DEV_FILES = {
    **_COMMON,
    "text_encoder": PartFile(
        own="layers.0.self_attn.q_proj.weight",
        prefixes=LANGUAGE_PREFIXES,
        foreign=("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias"),  # Qwen's
    ),
}
KLEIN_FILES = {
    **_COMMON,
    "text_encoder": QWEN3,
}
