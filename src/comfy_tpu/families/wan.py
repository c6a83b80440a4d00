"""Wan 2.1: what generic machinery must know of its transformer, its UMT5 text encoder and its VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.parallel.rules import column, gather, replicate, row


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel.from_config(dict(config))


def _build_text_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**config))


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan.from_config(dict(config))


TRANSFORMER = ComponentSpec(
    name="transformer",
    build=_build_transformer,
    stacks=(LayerStack("blocks"),),
    float32=("*time_embedder*", "*scale_shift_table", "*.norm[123].*"),
    rules=(
        column("blocks.*.attn[12].to_[qkv].*"),
        column("blocks.*.attn[12].norm_[qk].weight"),  # over all heads at once, so it follows the columns
        row("blocks.*.attn[12].to_out.0.weight"),
        replicate("blocks.*.attn[12].to_out.0.bias"),
        column("blocks.*.ffn.net.0.proj.*"),
        row("blocks.*.ffn.net.2.weight"),
        replicate("blocks.*.ffn.net.2.bias"),
        replicate("blocks.*.norm2.*"),
        replicate("blocks.*.scale_shift_table"),
        gather("condition_embedder.*.weight"),
        replicate("condition_embedder.*.bias"),
        gather("patch_embedding.weight"),
        replicate("patch_embedding.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
        replicate("scale_shift_table"),
    ),
)

TEXT_ENCODER = ComponentSpec(
    name="text_encoder",
    build=_build_text_encoder,
    stacks=(LayerStack("encoder.block"),),
    rules=(
        row("shared.weight"),  # features over tp: a lookup then needs no gathering of the 256,384 rows
        column("encoder.block.*.SelfAttention.[qkv].weight"),
        row("encoder.block.*.SelfAttention.o.weight"),
        row("encoder.block.*.relative_attention_bias.weight"),  # (buckets, heads)
        column("encoder.block.*.DenseReluDense.wi*.weight"),
        row("encoder.block.*.DenseReluDense.wo.weight"),
        replicate("encoder.block.*.layer_norm.weight"),
        replicate("encoder.final_layer_norm.weight"),
    ),
)

VAE = ComponentSpec(
    name="vae",
    build=_build_vae,
    rules=(replicate("*"),),  # 0.25 GB; the picture is split over the mesh, not the weights
)
