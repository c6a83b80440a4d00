"""Weights of small diffusers models under the names of the original authors, as single files have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def _renamed(tensors: Mapping[str, torch.Tensor], patterns: tuple[tuple[str, str], ...]) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        made[name] = tensor
    return made


def _fused(tensors: Mapping[str, torch.Tensor], query: str, packed: str) -> Tensors:
    """The tensors with queries, keys and values one below the other. `query`: a pattern, its `q` in a group."""
    left = dict(tensors)
    for name in list(left):
        if match := re.search(query, name):
            at = match.start(1)
            parts = [left.pop(f"{name[:at]}{part}{name[at + 1 :]}") for part in "qkv"]
            left[name[: match.start()] + packed + name[match.end() :]] = torch.cat(parts)
    return left


def _swapped(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors with the halves of the last norm in the authors' order."""
    return {
        name: torch.cat(tensor.chunk(2)[::-1]) if name.startswith("norm_out.linear.") else tensor
        for name, tensor in tensors.items()
    }


_FLUX2 = (
    (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"^time_guidance_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
    (r"^time_guidance_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
    (r"^context_embedder", "txt_in"),
    (r"^x_embedder", "img_in"),
    (r"_modulation(_img|_txt)?\.linear", r"_modulation\1.lin"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"\.attn\.norm_q\.weight", ".img_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_k\.weight", ".img_attn.norm.key_norm.scale"),
    (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
    (r"\.attn\.to_out\.0", ".img_attn.proj"),
    (r"\.attn\.to_add_out", ".txt_attn.proj"),
    (r"\.ff\.linear_in", ".img_mlp.0"),
    (r"\.ff\.linear_out", ".img_mlp.2"),
    (r"\.ff_context\.linear_in", ".txt_mlp.0"),
    (r"\.ff_context\.linear_out", ".txt_mlp.2"),
)


def flux2_transformer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    fused = _fused(_swapped(tensors), r"\.attn\.to_(q)\.", ".img_attn.qkv.")
    return _renamed(_fused(fused, r"\.attn\.add_(q)_proj\.", ".txt_attn.qkv."), _FLUX2)


def flux2_vae(tensors: Mapping[str, torch.Tensor], levels: int) -> Tensors:
    """As its authors have it: the two convolutions around the latents are inside of encoder and decoder."""
    inside = ((r"^quant_conv\.", "encoder.quant_conv."), (r"^post_quant_conv\.", "decoder.post_quant_conv."))
    return _renamed(ldm_vae(tensors, levels), inside)


_Z_IMAGE = (
    (r"^all_x_embedder\.2-1", "x_embedder"),
    (r"^all_final_layer\.2-1", "final_layer"),
    (r"\.attention\.to_out\.0", ".attention.out"),
    (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
)


def z_image_transformer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return _renamed(_fused(tensors, r"\.attention\.to_(q)\.", ".attention.qkv."), _Z_IMAGE)


_HUNYUAN = (
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
    (r"^(context_embedder\.token_refiner.*)\.norm_out\.linear", r"\1.adaLN_modulation.1"),
    (r"^(context_embedder\.token_refiner.*)\.attn\.to_out\.0", r"\1.self_attn_proj"),
    (r"^(context_embedder\.token_refiner.*)\.ff\.net\.0\.proj", r"\1.mlp.fc1"),
    (r"^(context_embedder\.token_refiner.*)\.ff\.net\.2", r"\1.mlp.fc2"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.", "txt_in.individual_token_refiner.blocks."),
    (r"^context_embedder_2\.norm", "byt5_in.layernorm"),
    (r"^context_embedder_2\.linear_", "byt5_in.fc"),
    (r"^image_embedder\.norm_in", "vision_in.proj.0"),
    (r"^image_embedder\.linear_1", "vision_in.proj.1"),
    (r"^image_embedder\.linear_2", "vision_in.proj.3"),
    (r"^image_embedder\.norm_out", "vision_in.proj.4"),
    (r"^time_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^x_embedder", "img_in"),
    (r"^cond_type_embed\.", "cond_type_embedding."),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"\.norm1\.linear", ".img_mod.linear"),
    (r"\.norm1_context\.linear", ".txt_mod.linear"),
    (r"\.attn\.to_out\.0", ".img_attn_proj"),
    (r"\.attn\.to_add_out", ".txt_attn_proj"),
    (r"\.attn\.to_([qkv])\.", r".img_attn_\1."),
    (r"\.attn\.add_([qkv])_proj\.", r".txt_attn_\1."),
    (r"\.attn\.norm_([qk])\.", r".img_attn_\1_norm."),
    (r"\.attn\.norm_added_([qk])\.", r".txt_attn_\1_norm."),
    (r"\.ff\.net\.0\.proj", ".img_mlp.fc1"),
    (r"\.ff\.net\.2", ".img_mlp.fc2"),
    (r"\.ff_context\.net\.0\.proj", ".txt_mlp.fc1"),
    (r"\.ff_context\.net\.2", ".txt_mlp.fc2"),
)
_HUNYUAN_COMFYUI = (
    (r"_embedder\.(?:mlp\.0|linear_1)\.", "_embedder.in_layer."),
    (r"_embedder\.(?:mlp\.2|linear_2)\.", "_embedder.out_layer."),
    (r"^time_in\.mlp\.0\.", "time_in.in_layer."),
    (r"^time_in\.mlp\.2\.", "time_in.out_layer."),
    (r"_mod\.linear\.", "_mod.lin."),
    (r"_attn_(qkv|proj)\.", r"_attn.\1."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_attn_q_norm\.weight", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm\.weight", "_attn.norm.key_norm.scale"),
)


def hunyuan_transformer(tensors: Mapping[str, torch.Tensor], *, comfyui: bool = False) -> Tensors:
    """As its authors have it; `comfyui`: as ComfyUI's module has it."""
    refiner = {name: tensor for name, tensor in tensors.items() if ".refiner_blocks." in name}
    rest = {name: tensor for name, tensor in tensors.items() if name not in refiner}
    made = _renamed(_fused(refiner, r"\.attn\.to_(q)\.", ".self_attn_qkv.") | _swapped(rest), _HUNYUAN)
    if not comfyui:
        return made
    for kind in ("img", "txt"):
        made = _fused(made, rf"\.{kind}_attn_(q)\.", f".{kind}_attn_qkv.")
    return _renamed(made, _HUNYUAN_COMFYUI)


_HUNYUAN_VAE = (
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.(down|up)_blocks\.(\d)\.resnets\.", r".\1.\2.block."),
    (r"\.(down|up)_blocks\.(\d)\.(down|up)samplers\.0\.", r".\1.\2.\3sample."),
)


def hunyuan_vae(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return _renamed(tensors, _HUNYUAN_VAE)


def ltx_transformer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    names = ((r"^proj_in\.", "patchify_proj."), (r"^time_embed\.", "adaln_single."), (r"\.norm_([qk])\.", r".\1_norm."))
    return _renamed(tensors, names)


_LTX_091: dict[str, Any] = {
    "decoder_block_out_channels": (256, 512, 1024),
    "decoder_layers_per_block": (5, 6, 7, 8),
    "decoder_spatio_temporal_scaling": (True, True, True),
    "decoder_inject_noise": (True, True, True, False),
    "upsample_residual": (True, True, True),
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
}
LTX_VAE_CONFIGS: dict[str, dict[str, Any]] = {
    "0.9.0": {},
    "0.9.1": _LTX_091,
    "0.9.5": {
        **_LTX_091,
        "block_out_channels": (128, 256, 512, 1024, 2048),
        "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
        "layers_per_block": (4, 6, 6, 2, 2),
        "decoder_layers_per_block": (5, 5, 5, 5),
        "decoder_inject_noise": (False, False, False, False),
        "spatio_temporal_scaling": (True, True, True, True),
        "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    },
}
"""The VAEs that were published, as diffusers' conversion script has them."""
_LTX_DOWN = (
    *("down_blocks.0", "down_blocks.0.downsamplers.0", "down_blocks.0.conv_out"),
    *("down_blocks.1", "down_blocks.1.downsamplers.0", "down_blocks.1.conv_out"),
    *("down_blocks.2", "down_blocks.2.downsamplers.0", "down_blocks.3", "mid_block"),
)
_LTX_UP = (
    *("mid_block", "up_blocks.0", "up_blocks.1.upsamplers.0", "up_blocks.1"),
    *("up_blocks.2.conv_in", "up_blocks.2.upsamplers.0", "up_blocks.2"),
    *("up_blocks.3.conv_in", "up_blocks.3.upsamplers.0", "up_blocks.3"),
)
_LTX_UP_091 = ("mid_block", *(f"up_blocks.{at}{part}" for at in range(3) for part in (".upsamplers.0", "")))
_LTX_DOWN_095 = (*(f"down_blocks.{at}{part}" for at in range(4) for part in ("", ".downsamplers.0")), "mid_block")
_LTX_BLOCKS = {
    "0.9.0": (_LTX_DOWN, _LTX_UP),
    "0.9.1": (_LTX_DOWN, _LTX_UP_091),
    "0.9.5": (_LTX_DOWN_095, _LTX_UP_091),
}
"""The blocks of encoder and decoder in the authors' order."""


def ltx_vae(tensors: Mapping[str, torch.Tensor], version: str = "0.9.0") -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        part, _, inner = name.partition(".")
        numbered = _LTX_BLOCKS[version][part == "decoder"]
        # The longest first: a block's own name is the beginning of its sampler's.
        for block in sorted(numbered, key=len, reverse=True):
            if inner.startswith(f"{block}."):
                kind = "up" if part == "decoder" else "down"
                name = f"{part}.{kind}_blocks.{numbered.index(block)}.{inner.removeprefix(f'{block}.')}"
                break
        made[name] = tensor
    names = (
        (r"\.resnets\.", ".res_blocks."),
        (r"\.conv_shortcut\.conv\.", ".conv_shortcut."),
        (r"\.norm3\.", ".norm3.norm."),
        (r"^decoder\.time_embedder\.", "decoder.last_time_embedder."),
        (r"^decoder\.scale_shift_table$", "decoder.last_scale_shift_table"),
        (r"^latents_mean$", "per_channel_statistics.mean-of-means"),
        (r"^latents_std$", "per_channel_statistics.std-of-means"),
    )
    return _renamed(made, names)


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
