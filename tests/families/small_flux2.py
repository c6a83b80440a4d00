"""Small random Flux.2 pipelines on disk, with every piece that the real model directories have."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.families.small_flux import WORDS, random_weights
from tests.parity.small_models import temporary_directory

TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 48,  # three times 16
    "timestep_guidance_channels": 32,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (4, 4, 4, 4),
    "rope_theta": 2000,
}
VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
# Six heads, which tp=4 does not divide, and two of keys.
LANGUAGE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
QWEN = {**LANGUAGE, "num_hidden_layers": 29, "tie_word_embeddings": True}
MISTRAL: dict[str, Any] = {
    "text_config": {**LANGUAGE, "model_type": "mistral", "num_hidden_layers": 32, "sliding_window": None},
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
        "image_size": 28,
    },
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<start> {{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}think{% endif %}"
)
_DEV_TEMPLATE = "<start> {% for message in messages %}{{ message.role }} {{ message.content[0].text }} {% endfor %}"


def chat_tokenizer(template: str, padding_side: str) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "<start>", "<end>", "user", "system", "assistant", "think", *WORDS]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        padding_side=padding_side,
        chat_template=template,
        model_max_length=4096,
    )


def _vae() -> torch.nn.Module:
    vae = random_weights(AutoencoderKLFlux2(**VAE))
    vae.bn.running_mean.copy_(0.5 * torch.randn(16))  # type: ignore[union-attr, operator]
    vae.bn.running_var.copy_(0.5 + torch.rand(16))  # type: ignore[union-attr, operator]
    return vae


@functools.cache
def reference(variant: str) -> Flux2Pipeline | Flux2KleinPipeline:
    """ "dev", "klein" or "base"."""
    torch.manual_seed(0)
    dev = variant == "dev"
    common = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": _vae(),
        "transformer": random_weights(Flux2Transformer2DModel(**TRANSFORMER, guidance_embeds=dev)),
    }
    if dev:
        pipeline = Flux2Pipeline(
            **common,
            text_encoder=random_weights(Mistral3ForConditionalGeneration(Mistral3Config(**MISTRAL))),
            tokenizer=chat_tokenizer(_DEV_TEMPLATE, "left"),  # as Mistral's own
        )
    else:
        pipeline = Flux2KleinPipeline(
            **common,
            text_encoder=random_weights(Qwen3ForCausalLM(Qwen3Config(**QWEN))),
            tokenizer=chat_tokenizer(CHAT_TEMPLATE, "right"),
            is_distilled=variant == "klein",
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory(variant: str) -> Path:
    path = temporary_directory()
    reference(variant).save_pretrained(path)
    return path
