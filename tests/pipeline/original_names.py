"""Weights of small diffusers models under the names of the original authors, as single files have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

_WAN = (
    ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
    ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    (".attn1.", ".self_attn."),
    (".attn2.", ".cross_attn."),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".add_k_proj.", ".k_img."),
    (".add_v_proj.", ".v_img."),
    (".norm_added_k.", ".norm_k_img."),
    (".ffn.net.0.proj.", ".ffn.0."),
    (".ffn.net.2.", ".ffn.2."),
    (".norm2.", ".norm3."),
)


def wan_transformer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        if name == "scale_shift_table":
            name = "head.modulation"
        elif name.startswith("proj_out."):
            name = name.replace("proj_out.", "head.head.")
        name = name.replace("scale_shift_table", "modulation")
        for own, original in _WAN:
            name = name.replace(own, original)
        made[name] = tensor
    return made


_VAE = (
    ("post_quant_conv.", "conv2."),
    ("quant_conv.", "conv1."),
    (".mid_block.resnets.0.", ".middle.0."),
    (".mid_block.attentions.0.", ".middle.1."),
    (".mid_block.resnets.1.", ".middle.2."),
    (".norm_out.", ".head.0."),
    (".conv_out.", ".head.2."),
)


def wan_vae(tensors: Mapping[str, torch.Tensor], resnets: int) -> Tensors:
    """`resnets`: those of a block of the decoder."""
    made = {}
    for name, tensor in tensors.items():
        for own, original in _VAE:
            name = name.replace(own, original)
        inner = {".norm1.": ".residual.0.", ".norm2.": ".residual.3.", ".conv2.": ".residual.6."}
        if ".blocks." in name or "_blocks." in name or ".middle." in name:
            name = name.replace(".conv1.", ".residual.2.")
            for own, original in inner.items():
                name = name.replace(own, original)
        name = name.replace(".conv_shortcut.", ".shortcut.").replace(".conv_in.", ".conv1.")
        if match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", name):
            index = int(match[3]) if match[2] == "resnets" else resnets
            name = f"decoder.upsamples.{int(match[1]) * (resnets + 1) + index}.{match[4]}"
        made[name.replace("encoder.down_blocks.", "encoder.downsamples.")] = tensor
    return made


_UMT5 = (
    ("shared.", "token_embedding."),
    ("encoder.final_layer_norm.", "norm."),
    ("encoder.block.", "blocks."),
    (".layer.0.SelfAttention.relative_attention_bias.", ".pos_embedding.embedding."),
    (".layer.0.SelfAttention.", ".attn."),
    (".layer.0.layer_norm.", ".norm1."),
    (".layer.1.layer_norm.", ".norm2."),
    (".layer.1.DenseReluDense.wi_0.", ".ffn.gate.0."),
    (".layer.1.DenseReluDense.wi_1.", ".ffn.fc1."),
    (".layer.1.DenseReluDense.wo.", ".ffn.fc2."),
)


def umt5(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        for own, original in _UMT5:
            name = name.replace(own, original)
        made[name] = tensor
    return made


_FLUX = (
    ("time_text_embed.timestep_embedder.linear_1", "time_in.in_layer"),
    ("time_text_embed.timestep_embedder.linear_2", "time_in.out_layer"),
    ("time_text_embed.text_embedder.linear_1", "vector_in.in_layer"),
    ("time_text_embed.text_embedder.linear_2", "vector_in.out_layer"),
    ("time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer"),
    ("time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer"),
    ("context_embedder", "txt_in"),
    ("x_embedder", "img_in"),
)
_FLUX_DOUBLE = (
    ("norm1.linear", "img_mod.lin"),
    ("norm1_context.linear", "txt_mod.lin"),
    ("attn.norm_q.weight", "img_attn.norm.query_norm.scale"),
    ("attn.norm_k.weight", "img_attn.norm.key_norm.scale"),
    ("attn.norm_added_q.weight", "txt_attn.norm.query_norm.scale"),
    ("attn.norm_added_k.weight", "txt_attn.norm.key_norm.scale"),
    ("attn.to_out.0", "img_attn.proj"),
    ("attn.to_add_out", "txt_attn.proj"),
    ("ff.net.0.proj", "img_mlp.0"),
    ("ff.net.2", "img_mlp.2"),
    ("ff_context.net.0.proj", "txt_mlp.0"),
    ("ff_context.net.2", "txt_mlp.2"),
)
_FLUX_SINGLE = (
    ("norm.linear", "modulation.lin"),
    ("attn.norm_q.weight", "norm.query_norm.scale"),
    ("attn.norm_k.weight", "norm.key_norm.scale"),
    ("proj_out", "linear2"),
)


def flux_transformer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    left, made = dict(tensors), {}
    for kind in ("weight", "bias"):
        made[f"final_layer.linear.{kind}"] = left.pop(f"proj_out.{kind}")
        scale, shift = left.pop(f"norm_out.linear.{kind}").chunk(2)
        made[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat((shift, scale))
        for block in sorted({name.split(".")[1] for name in left if name.startswith("transformer_blocks.")}):
            old, new = f"transformer_blocks.{block}.attn.", f"double_blocks.{block}."
            image, text = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
            made[f"{new}img_attn.qkv.{kind}"] = torch.cat([left.pop(f"{old}{part}.{kind}") for part in image])
            made[f"{new}txt_attn.qkv.{kind}"] = torch.cat([left.pop(f"{old}{part}.{kind}") for part in text])
        for block in sorted({name.split(".")[1] for name in left if name.startswith("single_transformer_blocks.")}):
            old = f"single_transformer_blocks.{block}."
            parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            made[f"single_blocks.{block}.linear1.{kind}"] = torch.cat(
                [left.pop(f"{old}{part}.{kind}") for part in parts]
            )
    for name, tensor in left.items():
        single, double = name.startswith("single_transformer_blocks."), name.startswith("transformer_blocks.")
        for own, original in _FLUX_SINGLE if single else _FLUX_DOUBLE if double else _FLUX:
            name = name.replace(f".{own}", f".{original}") if single or double else name.replace(own, original)
        name = name.replace("single_transformer_blocks.", "single_blocks.")
        made[name.replace("transformer_blocks.", "double_blocks.")] = tensor
    return made


def ldm_vae(tensors: Mapping[str, torch.Tensor], levels: int) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        name = name.replace(".mid_block.resnets.0.", ".mid.block_1.").replace(".mid_block.resnets.1.", ".mid.block_2.")
        name = name.replace(".conv_shortcut.", ".nin_shortcut.").replace(".conv_norm_out.", ".norm_out.")
        name = re.sub(r"\.down_blocks\.(\d)\.resnets\.", r".down.\1.block.", name)
        name = re.sub(r"\.down_blocks\.(\d)\.downsamplers\.0\.", r".down.\1.downsample.", name)
        if match := re.search(r"\.up_blocks\.(\d)\.(resnets|upsamplers\.0)\.", name):
            part = "block" if match[2] == "resnets" else "upsample"
            name = name.replace(match[0], f".up.{levels - 1 - int(match[1])}.{part}.")
        if ".mid_block.attentions.0." in name:
            name = name.replace(".mid_block.attentions.0.", ".mid.attn_1.").replace(".group_norm.", ".norm.")
            for own, original in (
                (".to_q.", ".q."),
                (".to_k.", ".k."),
                (".to_v.", ".v."),
                (".to_out.0.", ".proj_out."),
            ):
                name = name.replace(own, original)
            tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor  # a convolution of single pixels
        made[name] = tensor
    return made


def scaled_fp8(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Matrices in fp8 with a scale each, as ComfyUI's scaled files have them."""
    made: Tensors = {"scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn).zero_()}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.endswith(".weight"):
            scale = (tensor.abs().max() / 448).float()
            made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            made[name.removesuffix("weight") + "scale_weight"] = scale
            made[name.removesuffix("weight") + "scale_input"] = torch.tensor(1.0)
        else:
            made[name] = tensor
    return made


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)
    return path
