"""The image VAE of Flux.1 and Z-Image in single files, under the names of its authors or of diffusers."""

from __future__ import annotations

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config


def _convert_vae(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    converted: Tensors = convert_ldm_vae_checkpoint(tensors, config)
    return converted


IMAGE_VAE = PartFile(
    own="decoder.mid_block.attentions.0.group_norm.weight",
    original="decoder.mid.attn_1.norm.weight",
    convert=_convert_vae,
    prefixes=("vae.", "first_stage_model."),
    foreign=("bn.running_mean",),  # of Flux.2's VAE
)
