"""Z-Image in single files, under the names of its authors, which ComfyUI's files have too."""

from __future__ import annotations

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.encoder_files import QWEN3
from comfy_tpu.families.shared.vae_files import IMAGE_VAE


def _convert_transformer(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_z_image_transformer_checkpoint_to_diffusers(tensors)
    return converted


SINGLE_FILES = {
    "transformer": PartFile(
        own="all_x_embedder.2-1.weight",
        original="noise_refiner.0.attention.qkv.weight",
        convert=_convert_transformer,
        prefixes=("model.diffusion_model.",),
        required=("x_pad_token",),  # Lumina 2, of which Z-Image's code came, has none
    ),
    "text_encoder": QWEN3,
    "vae": IMAGE_VAE,
}
