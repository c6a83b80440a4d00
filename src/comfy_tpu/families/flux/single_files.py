"""Flux.1 in single files, under the names of its authors, which ComfyUI's files have too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.double_stream_files import unpack_tensors
from comfy_tpu.families.shared.encoder_files import CLIP, T5, rename_tensors
from comfy_tpu.families.shared.vae_files import IMAGE_VAE

_NAMES = {
    r"^img_in\.": "x_embedder.",
    r"^txt_in\.": "context_embedder.",
    r"^time_in\.": "time_text_embed.timestep_embedder.",
    r"^vector_in\.": "time_text_embed.text_embedder.",
    r"^guidance_in\.": "time_text_embed.guidance_embedder.",
    r"_embedder\.in_layer\.": "_embedder.linear_1.",
    r"_embedder\.out_layer\.": "_embedder.linear_2.",
    r"^final_layer\.linear\.": "proj_out.",
    r"^final_layer\.adaLN_modulation\.1\.": "norm_out.linear.",
    r"^double_blocks\.": "transformer_blocks.",
    r"^single_blocks\.": "single_transformer_blocks.",
    r"\.img_mod\.lin\.": ".norm1.linear.",
    r"\.txt_mod\.lin\.": ".norm1_context.linear.",
    r"\.modulation\.lin\.": ".norm.linear.",
    r"\.img_attn\.proj\.": ".attn.to_out.0.",
    r"\.txt_attn\.proj\.": ".attn.to_add_out.",
    r"\.img_attn\.norm\.query_norm\.(?:scale|weight)$": ".attn.norm_q.weight",
    r"\.img_attn\.norm\.key_norm\.(?:scale|weight)$": ".attn.norm_k.weight",
    r"\.txt_attn\.norm\.query_norm\.(?:scale|weight)$": ".attn.norm_added_q.weight",
    r"\.txt_attn\.norm\.key_norm\.(?:scale|weight)$": ".attn.norm_added_k.weight",
    r"\.norm\.query_norm\.(?:scale|weight)$": ".attn.norm_q.weight",
    r"\.norm\.key_norm\.(?:scale|weight)$": ".attn.norm_k.weight",
    r"\.img_mlp\.0\.": ".ff.net.0.proj.",
    r"\.img_mlp\.2\.": ".ff.net.2.",
    r"\.txt_mlp\.0\.": ".ff_context.net.0.proj.",
    r"\.txt_mlp\.2\.": ".ff_context.net.2.",
    r"\.linear2\.": ".proj_out.",
}
"""Patterns, in order."""
_PACKED = {
    ".img_attn.qkv.": (".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
    ".txt_attn.qkv.": (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."),
    ".linear1.": (".attn.to_q.", ".attn.to_k.", ".attn.to_v.", ".proj_mlp."),
}
"""Tensors of the file that are several here, one below the other."""


def _convert_transformer(tensors: Tensors, config: Config) -> Tensors:
    """As diffusers' converter, which knows the width of the published models only."""

    def split(part: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        width = tensor.shape[0] // 3 if part.endswith(".qkv.") else config["num_attention_heads"] * _head(config)
        rest = tensor.shape[0] - 3 * width
        return tensor.split((width,) * 3 + ((rest,) if rest else ()))

    return unpack_tensors(rename_tensors(tensors, _NAMES), _PACKED, split)


def _head(config: Config) -> int:
    return int(config.get("attention_head_dim", 128))


SINGLE_FILES = {
    "transformer": PartFile(
        # Both in Flux.1 alone: the names of its attentions are also those of Flux.2 and HunyuanVideo-1.5.
        own="single_transformer_blocks.0.norm.linear.weight",
        original="single_blocks.0.modulation.lin.weight",
        convert=_convert_transformer,
        prefixes=("model.diffusion_model.",),
    ),
    "text_encoder": CLIP,
    "text_encoder_2": T5,
    "vae": IMAGE_VAE,
}
