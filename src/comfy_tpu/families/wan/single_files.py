"""Wan in single files, under the names of Wan's authors, which ComfyUI's files have too."""

from __future__ import annotations

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.encoder_files import CLIP_VISION, UMT5, rename_tensors
from comfy_tpu.families.shared.vae_files import CAUSAL_VAE


def _convert_transformer(tensors: Tensors, config: Config) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    converted: Tensors = convert_wan_transformer_to_diffusers(tensors)
    return rename_tensors(converted, {r"^img_emb\.emb_pos$": "condition_embedder.image_embedder.pos_embed"})


_TRANSFORMER = PartFile(
    own="blocks.0.attn1.to_q.weight",
    original="blocks.0.self_attn.q.weight",
    convert=_convert_transformer,
    prefixes=("model.diffusion_model.",),
)
SINGLE_FILES = {
    "transformer": _TRANSFORMER,
    "transformer_2": _TRANSFORMER,
    "text_encoder": UMT5,
    "image_encoder": CLIP_VISION,
    "vae": CAUSAL_VAE,
}
