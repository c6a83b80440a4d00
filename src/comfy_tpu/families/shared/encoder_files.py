"""Text and image encoders in single files: under the names of transformers, or those of UMT5's use in Wan."""

from __future__ import annotations

import re

from comfy_tpu.compiler.recorded_tensors import Tensors
from comfy_tpu.compiler.single_file import PartFile
from comfy_tpu.families.card import Config

_UMT5_NAMES = {
    r"^token_embedding\.": "shared.",
    r"^norm\.": "encoder.final_layer_norm.",
    r"^blocks\.(\d+)\.attn\.([qkvo])\.": r"encoder.block.\1.layer.0.SelfAttention.\2.",
    r"^blocks\.(\d+)\.pos_embedding\.embedding\.": r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.",
    r"^blocks\.(\d+)\.norm1\.": r"encoder.block.\1.layer.0.layer_norm.",
    r"^blocks\.(\d+)\.norm2\.": r"encoder.block.\1.layer.1.layer_norm.",
    r"^blocks\.(\d+)\.ffn\.gate\.0\.": r"encoder.block.\1.layer.1.DenseReluDense.wi_0.",
    r"^blocks\.(\d+)\.ffn\.fc1\.": r"encoder.block.\1.layer.1.DenseReluDense.wi_1.",
    r"^blocks\.(\d+)\.ffn\.fc2\.": r"encoder.block.\1.layer.1.DenseReluDense.wo.",
}


def rename_tensors(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """The tensors with each regular expression of `names` replaced in their names, in order."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _convert_umt5(tensors: Tensors, config: Config) -> Tensors:
    return rename_tensors(tensors, _UMT5_NAMES)


# Some files have the embedding table a second time, under the name of T5's encoder; ComfyUI's UMT5 file also holds its
# tokenizer, as bytes.
_T5_IGNORED = ("encoder.embed_tokens.weight", "spiece_model", "logit_scale")

T5 = PartFile(own="encoder.block.0.layer.0.SelfAttention.q.weight", ignored=_T5_IGNORED)
UMT5 = PartFile(own=T5.own, original="blocks.0.attn.q.weight", convert=_convert_umt5, ignored=_T5_IGNORED)
CLIP = PartFile(
    own="text_model.encoder.layers.0.self_attn.q_proj.weight",
    ignored=("text_projection.*", "logit_scale", "text_model.embeddings.position_ids"),
)
CLIP_VISION = PartFile(
    own="vision_model.encoder.layers.0.self_attn.q_proj.weight",
    ignored=("visual_projection.*", "logit_scale", "vision_model.embeddings.position_ids"),
)

# ComfyUI's files have the language model alone, after "model."; transformers' have other parts beside it.
LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
QWEN3 = PartFile(own="layers.0.self_attn.q_norm.weight", prefixes=LANGUAGE_PREFIXES)
