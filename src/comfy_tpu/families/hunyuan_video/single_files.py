"""HunyuanVideo-1.5 in single files, under the names of its authors or of ComfyUI's files."""

from __future__ import annotations

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.double_stream_files import unpack_tensors
from comfy_tpu.families.shared.encoder_files import LANGUAGE_PREFIXES, T5, rename_tensors

# Where two names are given, the first is the authors', the second ComfyUI's.
_NAMES = {
    r"^time_in\.(?:mlp\.0|in_layer)\.": "time_embed.timestep_embedder.linear_1.",
    r"^time_in\.(?:mlp\.2|out_layer)\.": "time_embed.timestep_embedder.linear_2.",
    r"^txt_in\.t_embedder\.(?:mlp\.0|in_layer)\.": "context_embedder.time_text_embed.timestep_embedder.linear_1.",
    r"^txt_in\.t_embedder\.(?:mlp\.2|out_layer)\.": "context_embedder.time_text_embed.timestep_embedder.linear_2.",
    r"^txt_in\.c_embedder\.(?:linear_1|in_layer)\.": "context_embedder.time_text_embed.text_embedder.linear_1.",
    r"^txt_in\.c_embedder\.(?:linear_2|out_layer)\.": "context_embedder.time_text_embed.text_embedder.linear_2.",
    r"^txt_in\.input_embedder\.": "context_embedder.proj_in.",
    r"^txt_in\.individual_token_refiner\.blocks\.(\d+)\.": r"context_embedder.token_refiner.refiner_blocks.\1.",
    r"\.self_attn[_.]proj\.": ".attn.to_out.0.",
    r"\.self_attn[_.]qkv\.": ".self_attn.qkv.",
    r"(refiner_blocks\.\d+)\.mlp\.(?:fc1|0)\.": r"\1.ff.net.0.proj.",
    r"(refiner_blocks\.\d+)\.mlp\.(?:fc2|2)\.": r"\1.ff.net.2.",
    r"(refiner_blocks\.\d+)\.adaLN_modulation\.1\.": r"\1.norm_out.linear.",
    r"^byt5_in\.layernorm\.": "context_embedder_2.norm.",
    r"^byt5_in\.fc(\d)\.": r"context_embedder_2.linear_\1.",
    r"^vision_in\.proj\.0\.": "image_embedder.norm_in.",
    r"^vision_in\.proj\.1\.": "image_embedder.linear_1.",
    r"^vision_in\.proj\.3\.": "image_embedder.linear_2.",
    r"^vision_in\.proj\.4\.": "image_embedder.norm_out.",
    r"^img_in\.proj\.": "x_embedder.proj.",
    r"^cond_type_embedding\.": "cond_type_embed.",
    r"^final_layer\.adaLN_modulation\.1\.": "norm_out.linear.",
    r"^final_layer\.linear\.": "proj_out.",
    r"^double_blocks\.": "transformer_blocks.",
    r"\.img_mod\.lin(?:ear)?\.": ".norm1.linear.",
    r"\.txt_mod\.lin(?:ear)?\.": ".norm1_context.linear.",
    r"\.(img|txt)_attn[_.]qkv\.": r".\1_attn.qkv.",
    r"\.img_attn_([qkv])\.": r".attn.to_\1.",
    r"\.txt_attn_([qkv])\.": r".attn.add_\1_proj.",
    r"\.img_attn(?:_q_norm\.weight|\.norm\.query_norm\.(?:scale|weight))$": ".attn.norm_q.weight",
    r"\.img_attn(?:_k_norm\.weight|\.norm\.key_norm\.(?:scale|weight))$": ".attn.norm_k.weight",
    r"\.txt_attn(?:_q_norm\.weight|\.norm\.query_norm\.(?:scale|weight))$": ".attn.norm_added_q.weight",
    r"\.txt_attn(?:_k_norm\.weight|\.norm\.key_norm\.(?:scale|weight))$": ".attn.norm_added_k.weight",
    r"\.img_attn[_.]proj\.": ".attn.to_out.0.",
    r"\.txt_attn[_.]proj\.": ".attn.to_add_out.",
    r"\.img_mlp\.(?:fc1|0)\.": ".ff.net.0.proj.",
    r"\.img_mlp\.(?:fc2|2)\.": ".ff.net.2.",
    r"\.txt_mlp\.(?:fc1|0)\.": ".ff_context.net.0.proj.",
    r"\.txt_mlp\.(?:fc2|2)\.": ".ff_context.net.2.",
}
"""Patterns, in order."""
_PACKED = {
    ".self_attn.qkv.": (".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
    ".img_attn.qkv.": (".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
    ".txt_attn.qkv.": (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."),
}
"""Tensors of the file that are three here, one below the other. The authors pack those of the text's blocks alone."""
_VAE_NAMES = {
    r"\.mid\.block_1\.": ".mid_block.resnets.0.",
    r"\.mid\.block_2\.": ".mid_block.resnets.1.",
    r"\.mid\.attn_1\.([qkv])\.": r".mid_block.attentions.0.to_\1.",
    r"\.mid\.attn_1\.": ".mid_block.attentions.0.",
    r"^(encoder\.down|decoder\.up)\.(\d+)\.block\.": r"\1_blocks.\2.resnets.",
    r"^encoder\.down\.(\d+)\.downsample\.": r"encoder.down_blocks.\1.downsamplers.0.",
    r"^decoder\.up\.(\d+)\.upsample\.": r"decoder.up_blocks.\1.upsamplers.0.",
}


def _convert_transformer(tensors: Tensors, config: Config) -> Tensors:
    if any(name.startswith("time_r_in.") for name in tensors):
        raise UnsupportedError(
            "the transformer was distilled with MeanFlow (time_r_in), which wants two timesteps; use a model without"
        )
    return unpack_tensors(rename_tensors(tensors, _NAMES), _PACKED, lambda part, tensor: tensor.chunk(3))


def _convert_vae(tensors: Tensors, config: Config) -> Tensors:
    return rename_tensors(tensors, _VAE_NAMES)


SINGLE_FILES = {
    "transformer": PartFile(
        own="cond_type_embed.weight",
        original="cond_type_embedding.weight",
        convert=_convert_transformer,
        prefixes=("model.diffusion_model.", "model.model."),
    ),
    # Qwen2.5-VL: its language model alone has biases of queries. ComfyUI's file has its vision model beside it.
    "text_encoder": PartFile(
        own="layers.0.self_attn.q_proj.bias",
        prefixes=LANGUAGE_PREFIXES,
    ),
    "text_encoder_2": T5,
    "image_encoder": PartFile(
        own="encoder.layers.0.self_attn.q_proj.weight",
        prefixes=("vision_model.",),
        foreign=("pre_layrnorm.weight",),  # CLIP's; SigLIP has none
        ignored=("embeddings.position_ids",),
    ),
    "vae": PartFile(
        own="decoder.mid_block.attentions.0.norm.gamma",
        original="decoder.mid.attn_1.norm.gamma",
        convert=_convert_vae,
        prefixes=("vae.", "first_stage_model."),
        ignored=("*.temb_proj.*",),  # ComfyUI's modules have some, which nothing uses
    ),
}
