"""VAEs that several families have, in single files: that of Flux.1 and Z-Image, and that of Wan and Qwen-Image."""

from __future__ import annotations

import re

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.encoder_files import rename_tensors


def _convert_image_vae(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    converted: Tensors = convert_ldm_vae_checkpoint(tensors, config)
    return converted


IMAGE_VAE = PartFile(
    own="decoder.mid_block.attentions.0.group_norm.weight",
    original="decoder.mid.attn_1.norm.weight",
    convert=_convert_image_vae,
    prefixes=("vae.", "first_stage_model."),
    foreign=("bn.running_mean",),  # of Flux.2's VAE
)

_CAUSAL_NAMES = {
    r"^conv1\.": "quant_conv.",
    r"^conv2\.": "post_quant_conv.",
    r"\.residual\.0\.": ".norm1.",
    r"\.residual\.2\.": ".conv1.",
    r"\.residual\.3\.": ".norm2.",
    r"\.residual\.6\.": ".conv2.",
    r"\.shortcut\.": ".conv_shortcut.",
    r"^(encoder|decoder)\.conv1\.": r"\1.conv_in.",
    r"^(encoder|decoder)\.head\.0\.": r"\1.norm_out.",
    r"^(encoder|decoder)\.head\.2\.": r"\1.conv_out.",
    r"^(encoder|decoder)\.middle\.0\.": r"\1.mid_block.resnets.0.",
    r"^(encoder|decoder)\.middle\.1\.": r"\1.mid_block.attentions.0.",
    r"^(encoder|decoder)\.middle\.2\.": r"\1.mid_block.resnets.1.",
    # The 5B's VAE has its blocks in groups, as diffusers has them.
    r"^encoder\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.": (
        r"encoder.down_blocks.\1.downsampler.\2."
    ),
    r"^encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.": r"encoder.down_blocks.\1.resnets.\2.",
    r"^decoder\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.": r"decoder.up_blocks.\1.upsampler.\2.",
    r"^decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.": r"decoder.up_blocks.\1.resnets.\2.",
    r"^encoder\.downsamples\.": "encoder.down_blocks.",
}
"""Patterns, in order."""
_FLAT_UPSAMPLE = re.compile(r"decoder\.upsamples\.(\d+)\.(.+)")


def _convert_causal_vae(tensors: Tensors, config: Config) -> Tensors:
    # diffusers' own converter knows the sizes of the 2.1's VAE only.
    resnets = int(config.get("num_res_blocks", 2)) + 1
    converted: Tensors = {}
    for name, tensor in rename_tensors(tensors, _CAUSAL_NAMES).items():
        if match := _FLAT_UPSAMPLE.fullmatch(name):
            block, index = divmod(int(match[1]), resnets + 1)
            part = f"resnets.{index}" if index < resnets else "upsamplers.0"
            name = f"decoder.up_blocks.{block}.{part}.{match[2]}"
        converted[name] = tensor
    return converted


CAUSAL_VAE = PartFile(
    own="decoder.mid_block.attentions.0.to_qkv.weight",
    original="decoder.middle.1.to_qkv.weight",
    convert=_convert_causal_vae,
    prefixes=("vae.", "first_stage_model."),
)
